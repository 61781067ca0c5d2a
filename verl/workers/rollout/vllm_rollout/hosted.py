"""Where the engine's process begins: what vLLM must find set before it is imported, then vLLM."""

from collections.abc import Mapping
from importlib.util import find_spec
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
    if options["interprets"]:
        interpret_triton()
    from verl.workers.rollout.vllm_rollout import compatibility  # noqa: PLC0415 - imports vLLM

    compatibility.refuse_other_versions(options["versions"])
    if options["interprets"]:
        compatibility.prepare_for_interpreter()
    from verl.workers.rollout.vllm_rollout.engine import VLLMEngine  # noqa: PLC0415 - as above

    return VLLMEngine(options)


def interpret_triton() -> None:
    """Expert routes on a CPU: vLLM's model runner V2 returns them, and needs Triton.

    Triton interprets its kernels there. vLLM looks for a Triton with a back-end for CPUs, which no
    release on PyPI has; an entry without a compiler is enough, because none is called.
    """
    if find_spec("triton") is None:
        raise ValueError(
            "rollout.enable_rollout_routing_replay is True, and on a CPU vLLM needs Triton for "
            "that, which its environment does not have: pip install triton there, or set "
            "actor.router_replay.mode=R2"
        )
    set_variable("TRITON_INTERPRET", "1")
    set_variable("VLLM_USE_V2_MODEL_RUNNER", "1")
    from triton.backends import Backend, backends  # noqa: PLC0415 - reads TRITON_INTERPRET
    from triton.backends.compiler import BaseBackend  # noqa: PLC0415 - as above
    from triton.backends.driver import DriverBase  # noqa: PLC0415 - as above

    backends.setdefault("cpu", Backend(BaseBackend, DriverBase))
