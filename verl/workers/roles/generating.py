"""A worker that holds a rollout engine, and how others reach the engine.

In the same process the engine is used as it is (`rollout`). From elsewhere it is called in visits,
which suit loops that come and go, or with a whole batch at once (`generate_sequences`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.config.ppo import ActorRolloutRefConfig
from verl.protocol import DataProto
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.workers.roles.rank import RankWorker
from verl.workers.rollout.base import SamplingParams, TokenOutput
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine
from verl.workers.rollout.native.memory import cache_budget
from verl.workers.rollout.sequences import (
    SEED_COLUMN,
    pad_floats,
    padded_sequences,
    prompts_of,
    requests_of,
    sampling_options,
)
from verl.workers.rollout.visits import EngineVisits, Visit, VisitReport

ROLLOUT_MESH = "rollout"
STEPS_PER_VISIT, STEPS_PER_VISIT_ON_CPU = 8, 4
"""Tokens per sequence between two looks of the host; a device beside it waits meanwhile."""

SEEDS_PER_RANK = 1 << 32
"""Requests without a seed get fresh ones; no two engines take the same."""


class GeneratingWorker(RankWorker):
    """`init_model` of a subclass loads the model and calls `start_rollout`."""

    config: ActorRolloutRefConfig
    tokenizer: PreTrainedTokenizerBase
    rollout: NativeEngine

    @property
    def bucket_bytes(self) -> int:
        """How much of the weights travels at once, where the engine has its own."""
        return self.config.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20

    def start_rollout(
        self,
        module: PreTrainedModel,
        version: Callable[[], int],
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        """An engine that generates with the weights of `module`, whatever they are by then.

        The ranks of `tp_group` divide the module, which must be the engine's own.
        """
        rollout, tokenizer = self.config.rollout, self.tokenizer
        if rollout.name != "native":
            raise ValueError(
                f"rollout.name is {rollout.name!r}; this worker runs the built-in engine: "
                "set actor_rollout_ref.rollout.name=native"
            )
        device = next(module.parameters()).device
        self.rollout = NativeEngine(
            module,
            EngineLimits(
                max_num_seqs=rollout.max_num_seqs,
                max_prompt_tokens=rollout.prompt_length,
                max_response_tokens=rollout.response_length,
                max_prefill_tokens=rollout.max_num_batched_tokens,
                max_cache_bytes=cache_budget(device, rollout.gpu_memory_utilization),
                steps_per_visit=STEPS_PER_VISIT_ON_CPU if device.type == "cpu" else STEPS_PER_VISIT,
            ),
            eos_token_ids=end_tokens(module, tokenizer),
            version=version,
            decode_text=lambda ids: str(tokenizer.decode(ids)),
            seed=self.rank // rollout.tensor_model_parallel_size * SEEDS_PER_RANK,
            tp_group=tp_group,
        )
        self.visits = EngineVisits(self.rollout)

    # ---- visits ----------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_visit(self, visit: Visit) -> VisitReport:
        """Let requests in, generate for a while, and tell what has ended."""
        return self.visits.visit(visit)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_version(self) -> int:
        """How many updates the weights in use have seen."""
        return self.rollout.policy_version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_sleep(self) -> None:
        self.rollout.sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_wake_up(self) -> None:
        self.rollout.wake_up()

    # ---- a whole batch ---------------------------------------------------------------------------

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=ROLLOUT_MESH))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Continue every row once, with the columns that agent loops give, `timing` empty.

        For loops of one's own; the trainer's loops ask the engines one by one.
        """
        rollout = self.config.rollout
        ids = prompts_of(prompts, self.tokenizer, max_tokens=rollout.prompt_length)
        options = sampling_options(rollout, prompts.meta_info)
        params = SamplingParams(max_tokens=rollout.response_length, **options)
        seeds: Any = prompts.non_tensor_batch.get(SEED_COLUMN)
        answers = self.rollout.generate_batch(requests_of(ids, params, seeds))
        return self._as_batch(ids, [output for samples in answers for output in samples])

    def _as_batch(self, prompts: list[list[int]], outputs: Sequence[TokenOutput]) -> DataProto:
        rollout, pad_token_id = self.config.rollout, self.tokenizer.pad_token_id
        assert isinstance(pad_token_id, int)
        tensors = padded_sequences(
            prompts,
            [output.token_ids for output in outputs],
            [[1] * len(output.token_ids) for output in outputs],
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            pad_token_id=pad_token_id,
        )
        log_probs = [output.log_probs for output in outputs]
        tensors["rollout_log_probs"] = pad_floats(log_probs, rollout.response_length)
        return DataProto.from_dict(tensors=tensors, meta_info={"timing": {}})


def end_tokens(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a response: the model's, its generation config's, the tokenizer's."""
    ids: set[int] = set()
    stated: list[Any] = [tokenizer.eos_token_id, module.config.get_text_config().eos_token_id]
    if module.generation_config is not None:
        stated.append(module.generation_config.eos_token_id)
    for value in stated:
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return sorted(ids)
