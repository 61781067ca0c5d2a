"""A policy behind OpenAI's HTTP API: `serve(rollouts, tokenizer, ServerOptions(...))`."""

from verl.server.options import ServerOptions
from verl.server.running import RunningServer, serve

__all__ = ["RunningServer", "ServerOptions", "serve"]
