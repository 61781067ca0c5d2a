"""Tools: schemas, registries, leases."""
