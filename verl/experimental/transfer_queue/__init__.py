"""Training with batches in the store of TransferQueue."""
