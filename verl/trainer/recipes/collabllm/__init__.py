"""CollabLLM (arXiv:2502.00640): an answer is worth what the conversations are that follow it."""
