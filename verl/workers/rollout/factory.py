"""The registry of rollout engines: from `rollout.name` to an engine.

There are two kinds. `native` and `hf` run in the worker's process on a Hugging Face module, which
may be the very one that is trained. The others run in a process of their own, perhaps with another
Python, and weights are sent to them: `vllm`, `sglang`, and `native_process`, the built-in engine.
A name of your own is one function:

    @register_engine("mine")
    def my_engine(spec: ProcessEngineSpec) -> EngineSpec:
        return process_spec(spec, build="my_package.engine:build", options={...})
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.config.roles import ROLLOUTS, RolloutTraits
from verl.config.rollout import RolloutConfig
from verl.utils.device import get_visible_devices_keyword
from verl.utils.registry import Registry
from verl.workers.rollout.base import Rollout
from verl.workers.rollout.engine_options import sglang_options, vllm_environment, vllm_options
from verl.workers.rollout.hf_rollout import HFRollout
from verl.workers.rollout.native.cache import beside_weights, cache_budget
from verl.workers.rollout.native.engine import NativeEngine
from verl.workers.rollout.native.sequence import EngineLimits, end_tokens
from verl.workers.rollout.process.client import EngineSpec
from verl.workers.rollout.process.native import BUILD as BUILD_NATIVE
from verl.workers.rollout.process.native import native_options

STEPS_PER_VISIT, STEPS_PER_VISIT_ON_CPU = 8, 4
"""Tokens per sequence between two looks of the host; a device beside it waits meanwhile."""

SEEDS_PER_ENGINE = 1 << 32
"""The built-in engine counts fresh seeds up; no two engines take the same."""

SILENCE_SECONDS = 30.0
"""Heartbeats come from a thread of their own, also during long steps: load does not delay them."""


@dataclass(frozen=True, kw_only=True)
class ModuleEngineSpec:
    """An engine in this process, over `module`, whose weights have seen `version()` updates.

    The ranks of `tp_group` shard the module, which must then be the engine's own.
    """

    module: PreTrainedModel
    rollout: RolloutConfig
    tokenizer: PreTrainedTokenizerBase
    version: Callable[[], int]
    seed: int = 0
    """Another for each engine of a run: what is drawn for requests without a seed depends on it."""

    tp_group: ProcessGroup | None = None
    owns_module: bool = False
    """Whether only the engine uses the module, so that its weights count as its memory."""

    @property
    def end_tokens(self) -> list[int]:
        return end_tokens(self.module, self.tokenizer)

    def decode_text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


@dataclass(frozen=True, kw_only=True)
class ProcessEngineSpec:
    """An engine in a process of its own."""

    rollout: RolloutConfig
    model_path: str
    """A folder of this machine."""

    device: str
    """`cpu`, `cuda`, ..."""

    dtype: str = "float32"
    """Number format of the weights that are sent, as torch spells it."""

    seed: int = 0
    """Another for each engine of a run: what is drawn for requests without a seed depends on it."""

    trust_remote_code: bool = False
    tokenizer_path: str | None = None
    """None takes the model's."""

    override_config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model's configuration to change; only the built-in engine takes them."""

    visible_devices: tuple[str, ...] = ()
    """Visible devices, by the names that the driver's variable takes; all if it is not set."""

    has_weights: bool = False
    """Serve what is on disk from the start, instead of waiting for weights that are sent."""

    adapter: Mapping[str, Any] | None = None
    """peft's configuration of a LoRA adapter, if updates bring its tensors alone."""

    def options(self, make: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """What an engine's own function makes of it: plain values for the engine's process."""
        return make(
            self.rollout,
            self.model_path,
            device=self.device,
            dtype=self.dtype,
            seed=self.seed,
            trust_remote_code=self.trust_remote_code,
            has_weights=self.has_weights,
            adapter=None if self.adapter is None else dict(self.adapter),
        )


def native(spec: ModuleEngineSpec) -> Rollout:
    limits = native_limits(spec.rollout, next(spec.module.parameters()).device)
    if spec.owns_module:
        num_ranks = 1 if spec.tp_group is None else spec.tp_group.size()
        limits = beside_weights(limits, spec.module, num_ranks)
    return NativeEngine(
        spec.module,
        limits,
        eos_token_ids=spec.end_tokens,
        version=spec.version,
        decode_text=spec.decode_text,
        seed=spec.seed * SEEDS_PER_ENGINE,
        tp_group=spec.tp_group,
        spreads_experts=spec.rollout.expert_parallel_size > 1,
        keeps_cache=spec.rollout.kv_after_update == "keep",
        quantization=spec.rollout.quantization,
        records_routes=spec.rollout.enable_rollout_routing_replay,
        kv_cache_dtype=spec.rollout.kv_cache_dtype,
    )


def native_limits(rollout: RolloutConfig, device: torch.device) -> EngineLimits:
    budget = cache_budget(device, rollout.gpu_memory_utilization)
    # Conversations that wait for a tool keep their keys and values beside those that run.
    kept = budget // 2 if rollout.multi_turn.enable else 0
    return EngineLimits(
        max_num_seqs=rollout.max_num_seqs,
        max_prompt_tokens=rollout.prompt_length,
        max_response_tokens=rollout.response_length,
        max_prefill_tokens=rollout.max_num_batched_tokens,
        max_cache_bytes=budget - kept,
        max_session_bytes=kept or EngineLimits.max_session_bytes,
        tokens_per_step=STEPS_PER_VISIT_ON_CPU if device.type == "cpu" else STEPS_PER_VISIT,
    )


def hf(spec: ModuleEngineSpec) -> Rollout:
    pad_token_id = spec.tokenizer.pad_token_id
    assert isinstance(pad_token_id, int)
    return HFRollout(
        spec.module,
        max_num_seqs=spec.rollout.max_num_seqs,
        max_prompt_tokens=spec.rollout.prompt_length,
        max_response_tokens=spec.rollout.response_length,
        eos_token_ids=spec.end_tokens,
        pad_token_id=pad_token_id,
        version=spec.version,
        decode_text=spec.decode_text,
        seed=spec.seed * SEEDS_PER_ENGINE,
    )


def native_process(spec: ProcessEngineSpec) -> EngineSpec:
    """The built-in engine, apart from the trainer."""
    size = spec.rollout.tensor_model_parallel_size
    if size > 1:
        raise ValueError(
            f"rollout.tensor_model_parallel_size is {size}, but rollout.name=native_process has "
            "one device; rollout.name=native shards the model across ranks"
        )
    options = native_options(
        spec.model_path,
        native_limits(spec.rollout, torch.device(spec.device)),
        device=spec.device,
        dtype=spec.dtype,
        seed=spec.seed * SEEDS_PER_ENGINE,
        tokenizer_path=spec.tokenizer_path,
        trust_remote_code=spec.trust_remote_code,
        override_config=spec.override_config,
        keeps_cache=spec.rollout.kv_after_update == "keep",
        exact=spec.rollout.exact,
        quantization=spec.rollout.quantization,
        kv_cache_dtype=spec.rollout.kv_cache_dtype,
        records_routes=spec.rollout.enable_rollout_routing_replay,
    )
    return process_spec(spec, build=BUILD_NATIVE, options=options)


def vllm(spec: ProcessEngineSpec) -> EngineSpec:
    return process_spec(
        spec,
        build="verl.workers.rollout.vllm_rollout.hosted:build",
        options=spec.options(vllm_options),
        environment=vllm_environment(spec.device),
    )


def sglang(spec: ProcessEngineSpec) -> EngineSpec:
    return process_spec(
        spec,
        build="verl.workers.rollout.sglang_rollout.hosted:build",
        options=spec.options(sglang_options),
    )


def process_spec(
    spec: ProcessEngineSpec,
    *,
    build: str,
    options: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> EngineSpec:
    """What all engines with a process of their own have in common."""
    rollout, variables = spec.rollout, dict(environment or {})
    if spec.visible_devices:
        variables[get_visible_devices_keyword()] = ",".join(spec.visible_devices)
    return EngineSpec(
        build=build,
        options=options,
        python=None if rollout.python is None else str(Path(rollout.python).expanduser()),
        environment=variables,
        has_weights=spec.has_weights,
        bucket_bytes=rollout.checkpoint_engine.update_weights_bucket_megabytes << 20,
        start_seconds=rollout.server.max_start_wait_time,
        answer_seconds=SILENCE_SECONDS,
    )


@dataclass(frozen=True)
class RolloutEngine:
    """How to build an engine, and facts about it."""

    build: Callable[[Any], Any]
    """From a `ModuleEngineSpec` to a `Rollout`, or from a `ProcessEngineSpec` to the `EngineSpec`
    of its process."""

    traits: RolloutTraits


rollout_engines = Registry[RolloutEngine](
    "rollout engine",
    **{
        build.__name__: RolloutEngine(build, ROLLOUTS[build.__name__])
        for build in (native, hf, native_process, vllm, sglang)
    },
)

Build = TypeVar("Build", bound=Callable[[ProcessEngineSpec], EngineSpec])


def register_engine(name: str, **traits: Any) -> Callable[[Build], Build]:
    """Decorator: `rollout.name=<name>` starts the process that the function describes."""

    def add(build: Build) -> Build:
        rollout_engines.register(name)(RolloutEngine(build, RolloutTraits(**traits)))
        return build

    return add


def traits_of(name: str) -> RolloutTraits:
    """Facts about the engine of that `rollout.name`; unknown names are refused."""
    if name not in rollout_engines:
        known = ", ".join(sorted(rollout_engines))
        raise ValueError(
            f"rollout.name is {name!r}; known: {known}. A name of your own is registered with "
            "verl.workers.rollout.factory.register_engine by a module in "
            "actor_rollout_ref.model.external_lib"
        )
    return rollout_engines[name].traits


def has_own_process(name: str) -> bool:
    return traits_of(name).has_own_process


def ranks_per_engine(rollout: RolloutConfig) -> int:
    """Consecutive ranks whose devices one engine has."""
    size = rollout.tensor_model_parallel_size
    return size * rollout.pipeline_model_parallel_size if has_own_process(rollout.name) else size


def engine_spec(
    rollout: RolloutConfig, model_path: str, *, device: str, has_weights: bool, **options: Any
) -> EngineSpec:
    """The process of `rollout.name`; `options` are further fields of `ProcessEngineSpec`."""
    spec = ProcessEngineSpec(
        rollout=rollout, model_path=model_path, device=device, has_weights=has_weights, **options
    )
    return rollout_engines[rollout.name].build(spec)
