"""SGLang behind our protocol: its HTTP server runs as a child of the engine's process.

`options` runs in the trainer's environment. Everything else runs in SGLang's and needs the standard
library, torch and safetensors alone; what it asks of SGLang are the server's native endpoints.
"""
