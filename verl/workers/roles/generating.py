"""A worker that holds a rollout engine, and how others reach the engine.

In the same process the engine is used as it is (`rollout`). From elsewhere it is called in polls,
which suit loops that come and go, or with a whole batch at once (`generate_sequences`). Which
engine it is `rollout.name` says (`verl.workers.rollout.factory`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.config.actor import FSDPActorConfig
from verl.config.engine import FSDPEngineConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.protocol import DataProto
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils.fs import copy_to_local
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.spec import compute_dtype
from verl.workers.roles.adapter_sync import adapter_config, adapter_tensors
from verl.workers.roles.devices import devices_of_ranks
from verl.workers.roles.process_copy import ProcessCopy
from verl.workers.roles.rank import RankWorker
from verl.workers.roles.rollout_copy import ModuleCopy, RolloutCopy, load_copy
from verl.workers.rollout.base import Rollout, SamplingParams, TokenOutput
from verl.workers.rollout.factory import (
    EngineOrder,
    ModuleOrder,
    has_own_process,
    module_engines,
    process_engines,
    ranks_per_engine,
)
from verl.workers.rollout.polling import Poll, Poller, PollReport, poller_of
from verl.workers.rollout.process.client import EngineProcess
from verl.workers.rollout.process.hosted import EngineFacts
from verl.workers.rollout.sequences import (
    SEED_COLUMN,
    pad_floats,
    padded_sequences,
    prompts_of,
    requests_of,
    sampling_options,
)

ROLLOUT_MESH = "rollout"


class GeneratingWorker(RankWorker):
    """`init_model` of a subclass loads the tokenizer and starts the engine.

    On weights that are trained here (`start_on_module`), or on weights of its own, which somebody
    brings (`start_on_copy`), in this process or in one that the engine has to itself.
    """

    config: ActorRolloutRefConfig
    tokenizer: PreTrainedTokenizerBase
    rollout: Rollout
    """Not on a rank whose engine another rank leads."""

    poller: Poller
    rollout_copy: RolloutCopy | None = None
    """The engine's own weights; None where it generates with those that are trained."""

    @property
    def fsdp_config(self) -> FSDPEngineConfig:
        assert isinstance(self.config.actor, FSDPActorConfig)
        return self.config.actor.fsdp_config

    @property
    def leads_engine(self) -> bool:
        """Whether this rank calls the engine; of one in this process every rank calls its part."""
        rollout = self.config.rollout
        is_first = self.rank % ranks_per_engine(rollout) == 0
        return is_first or not has_own_process(rollout.name)

    @property
    def bucket_bytes(self) -> int:
        """How much of the weights travels at once, where the engine has its own."""
        return self.config.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20

    @property
    def trained_dtype(self) -> str:
        """The number format of the weights that are sent."""
        return str(compute_dtype(self.fsdp_config.dtype, self.device)).removeprefix("torch.")

    def load_tokenizer(self) -> None:
        model = self.config.model
        self.tokenizer = hf_tokenizer(
            model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code
        )

    def start_on_module(
        self,
        module: PreTrainedModel,
        version: Callable[[], int],
        tp_group: dist.ProcessGroup | None = None,
        *,
        owns_module: bool = False,
    ) -> None:
        """An engine that generates with the weights of `module`, whatever they are by then.

        The ranks of `tp_group` divide the module, which must be the engine's own.
        """
        build = module_engines[self.config.rollout.name]
        self._serve(
            build(
                ModuleOrder(
                    module=module,
                    rollout=self.config.rollout,
                    tokenizer=self.tokenizer,
                    version=version,
                    seed=self._engine_number,
                    tp_group=tp_group,
                    owns_module=owns_module,
                )
            )
        )

    def start_on_copy(self) -> None:
        """An engine with weights of its own, which generates nothing before they have come."""
        if has_own_process(self.config.rollout.name):
            self.rollout_copy = self._copy_in_process()
            return
        config, tp_size = self.config, self.config.rollout.tensor_model_parallel_size
        module = load_copy(config.model, self.fsdp_config, self.device)
        copy = ModuleCopy(module, bucket_bytes=self.bucket_bytes, is_divided=tp_size > 1)
        group = self.neighbours(tp_size)
        self.start_on_module(module, lambda: copy.version, group, owns_module=True)
        self.rollout_copy = copy

    def module_with_adapter(self) -> PreTrainedModel | None:
        """The model whose adapter is all that the engine is sent; None if it is sent everything."""
        return None

    def _copy_in_process(self) -> ProcessCopy:
        module = self.module_with_adapter()
        if module is None:
            return ProcessCopy(self._start_process())
        dtype = PrecisionType.to_dtype(self.trained_dtype)
        return ProcessCopy(
            self._start_process(adapter_config(module)),
            lambda trained: adapter_tensors(module, self.device, dtype),
        )

    def _start_process(self, adapter: dict[str, Any] | None = None) -> EngineProcess | None:
        """The process of this rank's engine, if it leads one; it uses the devices of all ranks
        that have the engine in common."""
        config = self.config
        group = self.neighbours(ranks_per_engine(config.rollout))
        devices = devices_of_ranks(group, self.device)
        if not self.leads_engine:
            return None
        order = EngineOrder(
            rollout=config.rollout,
            model_path=copy_to_local(config.model.path),
            device=self.device,
            dtype=self.trained_dtype,
            seed=self._engine_number,
            trust_remote_code=config.model.trust_remote_code,
            tokenizer_path=config.model.tokenizer_path,
            override_config=dict(config.model.override_config),
            visible_devices=devices,
            adapter=adapter,
        )
        process = EngineProcess(process_engines[config.rollout.name](order))
        process.start()
        self._serve(process)
        return process

    def _serve(self, rollout: Rollout) -> None:
        self.rollout, self.poller = rollout, poller_of(rollout)

    def stop_rollout(self) -> None:
        """End the engine's process, if it has one. It also ends with this process."""
        if isinstance(self.rollout, EngineProcess):
            self.rollout.close()

    @property
    def _engine_number(self) -> int:
        return self.rank // ranks_per_engine(self.config.rollout)

    # ---- polls -----------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_poll(self, poll: Poll) -> PollReport:
        """Take requests in, generate for a while, and report what has ended."""
        return self.poller.poll(poll)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_version(self) -> int:
        """How many updates the weights in use have seen."""
        return self.rollout.policy_version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_restarts(self) -> int:
        """How often the engine had to be started again."""
        return self.rollout.num_restarts

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_is_alive(self) -> bool:
        """Whether the engine that this rank leads can be asked; true if it leads none."""
        return not self.leads_engine or self.rollout.is_alive()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_facts(self) -> EngineFacts | None:
        """What the engine's process says of itself, on the rank that leads one."""
        if not self.leads_engine or not isinstance(self.rollout, EngineProcess):
            return None
        return self.rollout.facts

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
        if not self.leads_engine:
            return DataProto()  # only the answer of the rank that leads counts
        rollout = self.config.rollout
        ids = prompts_of(prompts, self.tokenizer, max_tokens=rollout.prompt_length)
        options = sampling_options(rollout, prompts.meta_info)
        params = SamplingParams(max_tokens=rollout.response_length, **options)
        seeds: Any = prompts.non_tensor_batch.get(SEED_COLUMN)
        self.rollout.wake_up()
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
