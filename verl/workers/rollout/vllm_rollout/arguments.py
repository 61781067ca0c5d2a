"""vLLM's `EngineArgs`, from what we derive and what the user adds.

`engine_kwargs.vllm` may set any argument of vLLM, except those on which the protocol rests: token
ids in and out, log-probabilities of a known kind, weights through our workers' extension.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

RESERVED = {
    "model": "actor_rollout_ref.model.path",
    "logprobs_mode": "rollout.logprobs_mode",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "pipeline_parallel_size": "rollout.pipeline_model_parallel_size",
    "enable_return_routed_experts": "rollout.enable_rollout_routing_replay",
    "enable_lora": "actor_rollout_ref.model.lora_rank",
}
"""Arguments that follow options of ours, and which."""

FIXED = {
    "skip_tokenizer_init": True,
    "generation_config": "vllm",
    "worker_extension_cls": "verl.workers.rollout.vllm_rollout.worker_extension.WeightLoading",
}
"""Arguments that are as they must be. Defaults from a `generation_config.json` would silently
change how tokens are drawn."""


def merged_arguments(
    derived: Mapping[str, Any], own: Mapping[str, Any], known: list[str], *, sees: bool = False
) -> dict[str, Any]:
    """`own`, the user's, win over `derived`; what vLLM does not know is refused.

    A model that `sees` needs the tokenizer, to which its processor of images belongs.
    """
    refuse_unknown(own, known)
    return {**derived, **own, **FIXED, "skip_tokenizer_init": not sees}


def refuse_unknown(own: Mapping[str, Any], known: list[str]) -> None:
    for name in own:
        if name in FIXED:
            raise ValueError(
                f"rollout.engine_kwargs.vllm.{name} cannot be set: it is always {FIXED[name]!r} "
                "here; remove it"
            )
        if name in RESERVED:
            raise ValueError(
                f"rollout.engine_kwargs.vllm.{name} cannot be set: it follows {RESERVED[name]}; "
                "set that"
            )
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"rollout.engine_kwargs.vllm.{name} is no argument of this vLLM's EngineArgs{hint}"
            )
