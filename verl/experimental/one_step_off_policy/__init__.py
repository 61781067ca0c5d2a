"""One-step-off training: a step trains while the responses of the next one are generated."""
