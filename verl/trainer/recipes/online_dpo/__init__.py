"""Online DPO: the best against the worst response to a prompt, by their rewards."""
