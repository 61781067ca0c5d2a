"""vLLM in a process of its own: its options on our side, the engine and its weights on its side.

`options` runs in the trainer's environment. Everything else runs in vLLM's, where only Python,
torch and vLLM (with what it needs, transformers and safetensors among it) are certain to be.
"""
