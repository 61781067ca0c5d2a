"""Older import path of datasets that grow."""
