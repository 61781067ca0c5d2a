"""How a Hugging Face module is made ready: our attention, the fused head, value heads."""
