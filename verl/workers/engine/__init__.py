"""Training engines: a model, its optimizer, and how it is spread over devices."""
