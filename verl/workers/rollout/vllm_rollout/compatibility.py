"""What differs between the versions of vLLM that are supported, and in which version it does.

The range is stated once, in `verl.config.roles.ROLLOUTS`. What the adapter uses is the same in all
of it, down to the parameters of `EngineArgs` and `SamplingParams`, except for

    0.24    a request that cannot run is a ValueError; 0.32 raises classes of its own, which are
            none. `VLLMValidationError` is in both, below the one or the other.

Updates while requests run need `EngineCore.pause_scheduler` with the mode "keep" (0.32 has it);
where it is missing they are refused.

`LoRAModelRunnerMixin.reset_lora_state` (0.32 has it, 0.24 does not) is not called: base weights are
replaced only in an engine without adapters.
"""

from inspect import signature

import vllm
from packaging.specifiers import SpecifierSet
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.core import EngineCore

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
