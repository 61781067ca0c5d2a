"""`Generator`: the rollout engine of a rank, wherever its weights are.

It starts the engine that `rollout.name` names (`verl.workers.rollout.factory`): on a module that is
trained here, on a copy of it in this process, or in a process of its own. In the first case there
are no weights to publish; else `weights` holds the engine's own. The engine itself is used as it is
in the same process, by polls from elsewhere, or with a whole batch at once.
"""

import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from verl.config.ppo import ActorRolloutRefConfig
from verl.models.exact import make_exact
from verl.models.lora import has_lora
from verl.protocol import DataProto
from verl.utils.device import (
    collect_all_again,
    exempt_from_collection,
    get_device_id,
    get_visible_devices_keyword,
)
from verl.utils.distributed import is_distributed
from verl.utils.environment import variable
from verl.utils.fs import copy_to_local
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.spec import compute_dtype
from verl.workers.roles.worker import engine_section
from verl.workers.rollout.base import Rollout, SamplingParams, TokenOutput
from verl.workers.rollout.engine_weights import (
    EngineWeights,
    KeptWeights,
    ModuleWeights,
    ProcessWeights,
    adapter_config,
    adapter_tensors,
    load_copy,
)
from verl.workers.rollout.factory import (
    ModuleEngineSpec,
    ProcessEngineSpec,
    has_own_process,
    ranks_per_engine,
    rollout_engines,
)
from verl.workers.rollout.native.engine import NativeEngine
from verl.workers.rollout.polling import Poller, poller_of
from verl.workers.rollout.process.client import EngineProcess
from verl.workers.rollout.process.hosted import EngineFacts
from verl.workers.rollout.publish import CheckSettings, Compared, DriftCheck, update_timing
from verl.workers.rollout.sequences import (
    SEED_COLUMN,
    pad_floats,
    padded_sequences,
    prompts_of,
    requests_of,
    sampling_options,
)
from verl.workers.rollout.trained import LocalPolicy

logger = logging.getLogger(__name__)


class Generator:
    """The rollout engine of one rank; `create_subgroups(size)` gives its group of ranks."""

    rollout: Rollout
    """Set on ranks that lead an engine."""

    poller: Poller
    has_engine = False
    weights: EngineWeights | None = None
    """The engine's own; None where it generates with those that are trained."""

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        *,
        device: str,
        rank: int,
        create_subgroups: Callable[[int], dist.ProcessGroup | None],
    ) -> None:
        model = config.model
        self.config, self.device, self.rank = config, device, rank
        self._create_subgroups = create_subgroups
        self.tokenizer = hf_tokenizer(
            model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code
        )
        is_first = rank % ranks_per_engine(config.rollout) == 0
        self.leads_engine = is_first or not has_own_process(config.rollout.name)
        """Whether this rank calls the engine; of one in this process every rank calls its shard."""

        self._check: DriftCheck | None = None
        self._update_metrics: dict[str, float] = {}

    def start(self, engine: BaseEngine, *, sequence_group: dist.ProcessGroup | None) -> None:
        """Generate beside `engine`: on its weights where a rank holds them whole, else on a copy of
        them, into which adapters are merged unless the rollout engine takes them apart."""
        rollout, module = self.config.rollout, engine.module
        self.train_exactly(engine)
        if shares_weights(self.config, engine):
            self.start_on_module(module, lambda: engine.policy_version)
            return
        takes_adapters = rollout_engines[rollout.name].traits.takes_adapters
        sends_adapter = takes_adapters and has_lora(module) and not self.config.model.lora.merge
        self.start_on_copy(module if sends_adapter else None)
        if isinstance(self.weights, ProcessWeights):
            self._check = self._check_of(engine, self.weights, sequence_group)
        if self._check is not None and rollout.probe and not sends_adapter:
            self._check.probe()  # leaves the trained weights in the engine
        self.sync(engine)

    def train_exactly(self, engine: BaseEngine) -> None:
        """With `rollout.exact`, let `engine` compute as the rollout engine does, wherever that is.

        They agree where both hold all weights whole, and the same ones: as they are trained, or a
        copy of them.
        """
        if not self.config.rollout.exact:
            return
        is_copy = self.config.rollout.tensor_model_parallel_size == 1 and not (
            engine.is_sharded or has_lora(engine.module)
        )
        if not is_copy and not shares_weights(self.config, engine):
            raise ValueError(
                "rollout.exact is True, but the rollout engine has other weights than those that "
                "are trained: shards of them, or with adapters merged into them, and then it "
                "computes otherwise. Set fsdp_config.sharding=zero1, rollout."
                "tensor_model_parallel_size=1 and model.lora.merge=False, or rollout.exact=False"
            )
        make_exact(engine.module, self._exact_capacity)

    @property
    def _exact_capacity(self) -> int:
        return self.config.rollout.prompt_length + self.config.rollout.response_length

    def sync(self, engine: BaseEngine, *, in_flight: bool = False) -> dict[str, float]:
        """Bring the rollout engine to the trained weights; nothing to do where it has them.

        The metrics of it: how far a rollout engine with code of its own is off, and seconds. All
        ranks call it. With `in_flight` requests may run; they go on with the new weights.
        """
        start = time.perf_counter()
        is_new = False
        if self.weights is not None:
            with self.paused():
                is_new = self.weights.update(engine, in_flight=in_flight)
        if is_new:
            updated, metrics = time.perf_counter(), {}
            assert self.weights is not None
            seconds = {"stall": updated - start} | dict(self.weights.seconds)
            if self._check is not None:
                metrics = self._check.after_update()
                seconds["check"] = time.perf_counter() - updated
            self._update_metrics = metrics | update_timing(time.perf_counter() - start, seconds)
        return dict(self._update_metrics)

    def paused(self) -> AbstractContextManager[None]:
        """No step of an engine in this process begins while the context lasts."""
        if self.leads_engine and isinstance(self.rollout, NativeEngine):
            return self.rollout.paused()
        return nullcontext()

    def sent_tensors(self, engine: BaseEngine) -> Iterator[tuple[str, Tensor]]:
        """What an update brings to the rollout engine; all ranks must iterate over it."""
        if isinstance(self.weights, ProcessWeights):
            return self.weights.sent_tensors(engine)
        return engine.get_per_tensor_param()

    def restore(self, kept: KeptWeights) -> None:
        """Restart the engine that this rank leads, if it is lost, with weights that were kept."""
        if isinstance(self.weights, ProcessWeights):
            self.weights.restore(kept)

    def check_settings(self, engine: BaseEngine) -> CheckSettings:
        """What a rollout engine is compared by with the policy."""
        dtype = trained_dtype(self.config, self.device)
        return CheckSettings.of(self.config, engine.module, dtype=dtype, device=self.device)

    def start_on_module(
        self,
        module: PreTrainedModel,
        version: Callable[[], int],
        tp_group: dist.ProcessGroup | None = None,
        *,
        owns_module: bool = False,
    ) -> None:
        """Generate with the weights of `module`, whatever they are by then.

        The ranks of `tp_group` shard the module, which must be the engine's own.
        """
        build = rollout_engines[self.config.rollout.name].build
        logger.info("rollout engine %s on the trainer's module", self.config.rollout.name)
        self._serve(
            build(
                ModuleEngineSpec(
                    module=module,
                    rollout=self.config.rollout,
                    tokenizer=self.tokenizer,
                    version=version,
                    seed=self._engine_index,
                    owns_module=owns_module,
                    tp_group=tp_group,
                )
            )
        )

    def start_on_copy(self, module_with_adapter: PreTrainedModel | None = None) -> None:
        """Start an engine with weights of its own, which generates nothing before they have come.

        Of `module_with_adapter` it is sent the adapter alone.
        """
        config = self.config
        if has_own_process(config.rollout.name):
            self.weights = self._start_process(module_with_adapter)
            return
        tp_size = config.rollout.tensor_model_parallel_size
        module = load_copy(config.model, engine_section(config.actor), self.device)
        if config.rollout.exact:
            make_exact(module, self._exact_capacity)
        bucket_bytes = update_bucket_bytes(config)
        weights = ModuleWeights(module, bucket_bytes=bucket_bytes, is_sharded=tp_size > 1)
        tp_group = self._create_subgroups(tp_size)
        self.start_on_module(module, lambda: weights.version, tp_group, owns_module=True)
        self.weights = weights

    def facts(self) -> EngineFacts:
        """The facts of the engine's process; of a rank that leads none only the length matters."""
        if self.leads_engine and isinstance(self.rollout, EngineProcess):
            return self.rollout.facts
        rollout = self.config.rollout
        return EngineFacts(
            name=rollout.name,
            version="",
            log_probs="processed",
            can_sleep=False,
            max_model_len=rollout.prompt_length + rollout.response_length,
        )

    def stop(self) -> None:
        """End the engine, which may not have started. It also ends with this process."""
        if self.has_engine:
            self.rollout.close()
            collect_all_again()

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Continue every row once, with the columns that agent loops give, `timing` empty."""
        if not self.leads_engine:
            return DataProto()  # only the result of the rank that leads is collected
        rollout = self.config.rollout
        ids = prompts_of(prompts, self.tokenizer, max_tokens=rollout.prompt_length)
        options = sampling_options(rollout, prompts.meta_info)
        params = SamplingParams(max_tokens=rollout.response_length, **options)
        seeds: Any = prompts.non_tensor_batch.get(SEED_COLUMN)
        self.rollout.wake_up()
        samples = self.rollout.generate_batch(requests_of(ids, params, seeds))
        return self._as_batch(ids, [output for outputs in samples for output in outputs])

    def _check_of(
        self,
        engine: BaseEngine,
        weights: ProcessWeights,
        sequence_group: dist.ProcessGroup | None,
    ) -> DriftCheck | None:
        """The drift check of a rollout engine with its own code; None where it cannot run."""
        num_ranks = dist.get_world_size() if is_distributed() else 1
        if sequence_group is not None or engine.get_data_parallel_size() < num_ranks:
            logger.warning(
                "ranks score the same rows together (ulysses_sequence_parallel_size, a Megatron "
                "layout) and not each the responses of an engine of theirs: the rollout engine is "
                "neither probed nor checked"
            )
            return None
        policy = LocalPolicy(engine, weights.replace)
        compared = Compared(weights.process, policy, self.facts())
        return DriftCheck([compared], self.check_settings(engine), on_ranks=True)

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

    def _start_process(self, module_with_adapter: PreTrainedModel | None) -> ProcessWeights:
        """The process of this rank's engine, if it leads one; it uses the devices of all ranks
        that have the engine in common."""
        config, dtype = self.config, trained_dtype(self.config, self.device)
        adapter = process = tensors = None
        if module_with_adapter is not None:
            adapter = adapter_config(module_with_adapter)
            torch_dtype = PrecisionType.to_dtype(dtype)
            tensors = partial(adapter_tensors, module_with_adapter, self.device, torch_dtype)
        group = self._create_subgroups(ranks_per_engine(config.rollout))
        devices = devices_of_ranks(group, self.device)
        if self.leads_engine:
            order = ProcessEngineSpec(
                rollout=config.rollout,
                model_path=copy_to_local(config.model.path),
                device=self.device,
                dtype=dtype,
                seed=self._engine_index,
                trust_remote_code=config.model.trust_remote_code,
                tokenizer_path=config.model.tokenizer_path,
                override_config=config.model.hf_overrides(),
                visible_devices=devices,
                adapter=adapter,
            )
            logger.info("rollout engine %s in a process of its own", config.rollout.name)
            process = EngineProcess(rollout_engines[config.rollout.name].build(order))
            process.start()
            exempt_from_collection()  # memory is given back before each update
            self._serve(process)
        return ProcessWeights(process, tensors)

    def _serve(self, rollout: Rollout) -> None:
        self.rollout, self.poller, self.has_engine = rollout, poller_of(rollout), True

    @property
    def _engine_index(self) -> int:
        return self.rank // ranks_per_engine(self.config.rollout)


def shares_weights(config: ActorRolloutRefConfig, engine: BaseEngine) -> bool:
    """Whether the rollout engine generates with the very weights that are trained."""
    is_merged = has_lora(engine.module) and config.model.lora.merge
    is_whole = config.rollout.tensor_model_parallel_size == 1 and not engine.is_sharded
    return is_whole and not is_merged and not has_own_process(config.rollout.name)


def trained_dtype(config: ActorRolloutRefConfig, device: str) -> str:
    """The number format of the weights that are sent."""
    return str(compute_dtype(engine_section(config.actor).dtype, device)).removeprefix("torch.")


def update_bucket_bytes(config: ActorRolloutRefConfig) -> int:
    """How much of the weights is sent at once, where the engine has its own."""
    return config.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20


def devices_of_ranks(group: dist.ProcessGroup | None, device: str) -> tuple[str, ...]:
    """Devices of all ranks of the group, or of this rank alone, by the names that another process
    must be given to use them; none on a CPU. All ranks must call it."""
    if device == "cpu":
        return ()
    visible = variable(get_visible_devices_keyword())
    names = [name.strip() for name in visible.split(",") if name.strip()]
    name = names[get_device_id()] if names else str(get_device_id())
    if group is None:
        return (name,)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (socket.gethostname(), name), group=group)
    machines = sorted({machine for machine, _ in gathered})
    if len(machines) > 1:
        raise ValueError(
            f"an engine has the devices of {len(gathered)} ranks, and these are on "
            f"{', '.join(machines)}; an engine in a process of its own has devices of one machine: "
            "choose rollout.tensor_model_parallel_size (times pipeline_model_parallel_size) so "
            "that it divides the devices of a machine"
        )
    return tuple(name for _, name in gathered)
