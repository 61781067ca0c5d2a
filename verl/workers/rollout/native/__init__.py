"""The built-in engine: generates with the trainer's own module and weights."""
