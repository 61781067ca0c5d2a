"""Checkpoints that survive a kill at any moment, and are never trusted before they are verified.

A step is written under a temporary name, synced, listed with its hashes in a manifest and renamed
(`store`, `manifest`); it is read only after every byte agrees with that manifest. Contents are
safetensors and JSON (`tensor_store`, `piece_files`, `hf_model`): data, never code.
"""
