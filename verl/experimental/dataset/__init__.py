"""Older import path of the samplers."""
