"""Checkpoints that survive a kill at any moment, and are never trusted before they are verified.

A step is written under a temporary name, synced, listed with its hashes in a manifest and renamed
(`commit`). It is read only after every byte agrees with that manifest (`verify`, `discover`).
Contents are safetensors and JSON (`tensor_store`, `hf_model`): data, never code.
"""
