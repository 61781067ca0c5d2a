"""Where the engine's process begins: what vLLM must find set before it is imported, then vLLM."""

from collections.abc import Mapping
from typing import Any

from verl.utils.environment import set_variable
from verl.workers.rollout.process.hosted import HostedEngine


def build(options: Mapping[str, Any]) -> HostedEngine:
    """Called in the engine's process with what `vllm_options` made."""
    # The scheduler in this process: the host steps it, and reads calls between two steps.
    set_variable("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if not options["compiles"]:
        # Even eager vLLM compiles a helper of its sampler, which takes longer than it ever saves.
        set_variable("TORCHDYNAMO_DISABLE", "1")
    from verl.workers.rollout.vllm_rollout.compatibility import (  # noqa: PLC0415 - imports vLLM
        refuse_other_versions,
    )

    refuse_other_versions(options["versions"])
    from verl.workers.rollout.vllm_rollout.engine import VLLMEngine  # noqa: PLC0415 - as above

    return VLLMEngine(options)
