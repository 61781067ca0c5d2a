"""Simulated users: what answers a turn of the model that calls no tool."""
