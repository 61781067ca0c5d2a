"""Tools that a model calls: their schemas, lifetimes, calls and the servers they live on."""
