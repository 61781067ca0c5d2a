"""The engines of batch generation and of the server, over weights on disk.

One engine that needs only a Hugging Face module runs in this process. Several, and those of other
packages, run in processes of their own, each with its own devices and its own seeds for requests
without one. Either all of them start or none is left.

Engines on several machines: a Ray actor per machine, with the engine processes of that machine.

    driver                                 machine 1, 2, ...: an actor
      Fleet -> EngineOnNode.submit  ---->    its engine number i continues the prompt
               future            <----       tokens, or the error of the engine

The driver deals requests to engines as it does on one machine; `EngineOnNode` is the engine that it
sees. The actor starts a lost engine anew when the driver asks for it; an actor that dies with its
machine is an engine that stays lost. Every machine reads the model by itself, so its path must be
one that all of them see, or the name of a model in their caches.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.config.faults import ConfigError, Fault
from verl.config.generation import GenerationConfig
from verl.config.rollout import RolloutConfig
from verl.models.fuse import fuse_model
from verl.models.loading import load_causal_lm
from verl.trainer.generation.plan import num_engines
from verl.utils.device import get_visible_devices_keyword, resolve_device, torch_module_of
from verl.utils.environment import WentWrong, variable
from verl.utils.import_utils import require
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.engine.spec import compute_dtype
from verl.workers.rollout.base import (
    EngineLostError,
    GenerationRequest,
    OnEnd,
    Rollout,
    TokenOutput,
)
from verl.workers.rollout.factory import (
    ModuleEngineSpec,
    ProcessEngineSpec,
    has_own_process,
    rollout_engines,
    traits_of,
)
from verl.workers.rollout.fleet import Recover
from verl.workers.rollout.process.client import EngineProcess, EngineStartError


class GenerationFailed(WentWrong, RuntimeError):
    """A batch could not be generated; finished batches are kept."""


@dataclass(frozen=True)
class Engines:
    """Engines that are ready, how to restart a lost one, and how to end them all."""

    rollouts: Sequence[Rollout]
    restart: Recover | None = None
    close: Callable[[], None] = lambda: None


def start_engines(
    config: GenerationConfig, model_path: str, *, num_batches: int, dtype: str
) -> Engines:
    """As many as the devices allow and the batches need, ready to generate.

    `dtype` is `auto` or the number format of the weights.
    """
    try:
        if config.trainer.nnodes > 1 or config.trainer.controller == "ray":
            rollouts, end = start_on_nodes(
                config, model_path, start_processes, num_batches=num_batches, dtype=dtype
            )
            return Engines(rollouts, restart=restart_on_node, close=end)
        device = resolve_device(config.trainer.device)
        count = min(num_engines(config), num_batches)
        if count == 1 and not has_own_process(config.rollout.name):
            return engine_here(config, model_path, device, dtype)
        processes = start_processes(
            config.rollout,
            model_path,
            count=count,
            device=device,
            dtype=dtype,
            trust_remote_code=config.model.trust_remote_code,
        )
    except ConfigError:
        raise
    except ValueError as refused:  # by the engine, the model or the device, in words for users
        raise ConfigError([Fault(str(refused), ("rollout.name",))]) from refused
    except EngineStartError as error:
        raise GenerationFailed(f"an engine does not start: {error}") from error

    def close() -> None:
        for process in processes:
            process.close()

    return Engines(processes, restart=restart_process, close=close)


def engine_here(config: GenerationConfig, model_path: str, device: str, dtype: str) -> Engines:
    """An engine in this process, which cannot be lost."""
    trusts_code = config.model.trust_remote_code
    module = load_causal_lm(
        model_path,
        dtype=compute_dtype(dtype, device),
        device=device,
        trust_remote_code=trusts_code,
    )
    fuse_model(module)
    spec = ModuleEngineSpec(
        module=module,
        rollout=config.rollout,
        tokenizer=hf_tokenizer(model_path, trust_remote_code=trusts_code),
        version=lambda: 0,
        owns_module=True,
    )
    engine = rollout_engines[config.rollout.name].build(spec)
    return Engines([engine], close=engine.close)


def restart_process(engine: Rollout) -> None:
    assert isinstance(engine, EngineProcess)
    engine.restart()


def restart_on_node(engine: Rollout) -> None:
    assert isinstance(engine, EngineOnNode)
    engine.restart()


def start_processes(
    rollout: RolloutConfig,
    model_path: str,
    *,
    count: int,
    device: str,
    dtype: str,
    trust_remote_code: bool,
) -> list[EngineProcess]:
    """Start `count` engines at the same time; the caller closes them.

    `dtype` is `auto` or the number format of the weights. `EngineStartError` if an engine does not
    come up, ValueError if it refuses its options.
    """
    build = rollout_engines[process_name(rollout.name)].build
    shares = device_shares(device, count, rollout.tensor_model_parallel_size)
    orders = [
        ProcessEngineSpec(
            rollout=rollout,
            model_path=model_path,
            device=device,
            dtype=str(compute_dtype(dtype, device)).removeprefix("torch."),
            seed=number,
            trust_remote_code=trust_remote_code,
            visible_devices=share,
            has_weights=True,
        )
        for number, share in enumerate(shares)
    ]
    processes = [EngineProcess(build(spec)) for spec in orders]
    with ExitStack() as closing:
        for process in processes:
            closing.callback(process.close)
        with ThreadPoolExecutor(count) as pool:  # each start has a deadline of its own
            list(pool.map(EngineProcess.start, processes))
        closing.pop_all()
    return processes


def process_name(name: str) -> str:
    """The name of the engine that runs in a process of its own."""
    traits = traits_of(name)
    if traits.process_name is not None or traits.has_own_process:
        return traits.process_name or name
    text = (
        f"rollout.name is {name!r}, which runs in this process, one engine alone; set "
        "trainer.n_gpus_per_node=1, or use rollout.name=native for several"
    )
    raise ConfigError([Fault(text, ("rollout.name",))])


def device_shares(device: str, count: int, size: int) -> Sequence[tuple[str, ...]]:
    """The devices of each of `count` engines, `size` each; on a CPU nothing is divided."""
    if device == "cpu":
        return [()] * count
    present = torch_module_of(device).device_count()
    if count * size > present:
        text = (
            f"{count} engines on {size} device(s) each need {count * size}, and this machine has "
            f"{present}; set trainer.n_gpus_per_node={present - present % size}"
        )
        raise ConfigError([Fault(text, ("trainer.n_gpus_per_node",))])
    visible = variable(get_visible_devices_keyword())
    names = visible.split(",") if visible else [str(number) for number in range(present)]
    return [tuple(names[first : first + size]) for first in range(0, count * size, size)]


START_SECONDS = 900.0
CALL_SECONDS = 60.0

StartProcesses = Callable[..., list[EngineProcess]]


class NodeEngines:
    """What an actor runs: the engines of its machine."""

    def __init__(
        self,
        start: StartProcesses,
        rollout: RolloutConfig,
        model_path: str,
        *,
        count: int,
        device: str,
        dtype: str,
        trust_remote_code: bool,
    ) -> None:
        self._engines: list[EngineProcess] = []
        self._start = partial(
            start,
            rollout,
            model_path,
            count=count,
            device=resolve_device(device),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )

    async def start(self) -> None:
        """Not as the actor is made: Ray would keep the error and give its text alone."""
        self._engines = await asyncio.to_thread(self._start)

    async def generate(self, number: int, request: GenerationRequest) -> list[TokenOutput]:
        return await self._engines[number].generate(request)

    async def abort(self, number: int, request_id: str) -> None:
        self._engines[number].abort(request_id)

    async def restart(self, number: int) -> None:
        await asyncio.to_thread(self._engines[number].restart)

    async def close(self) -> None:
        for engine in self._engines:
            await asyncio.to_thread(engine.close)


class EngineOnNode(Rollout):
    """One engine of a machine; its weights are those on disk."""

    def __init__(self, actor: Any, number: int) -> None:
        self._ray = require("ray", extra="ray")
        self._actor = actor
        self._number = number
        self._num_restarts = 0
        self._is_alive = True

    @property
    def policy_version(self) -> int:
        return 0

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    def is_alive(self) -> bool:
        return self._is_alive

    def submit(
        self, request: GenerationRequest, on_end: OnEnd | None = None
    ) -> Future[list[TokenOutput]]:
        result: Future[list[TokenOutput]] = Future()
        reference = self._actor.generate.remote(self._number, request)

        def resolve(answer: Future[list[TokenOutput]]) -> None:
            if not result.set_running_or_notify_cancel():
                return
            error = answer.exception(timeout=0)
            if error is None:
                outputs = answer.result(timeout=0)
                if on_end is not None:
                    for sample, output in enumerate(outputs):
                        on_end(sample, output)
                result.set_result(outputs)
            elif isinstance(error, ValueError):
                result.set_exception(ValueError(str(error)))
            else:
                self._is_alive = False
                result.set_exception(EngineLostError(f"an engine of a machine is lost: {error}"))

        def abort_if_cancelled(future: Future[list[TokenOutput]]) -> None:
            if future.cancelled():
                self.abort(request.request_id)

        result.add_done_callback(abort_if_cancelled)
        reference.future().add_done_callback(resolve)
        return result

    def abort(self, request_id: str) -> None:
        self._actor.abort.remote(self._number, request_id)

    def close_session(self, session_id: str) -> None:
        """Requests of a file have no sessions."""

    def sleep(self) -> None:
        raise NotImplementedError("engines of batch generation run until they are closed")

    def wake_up(self) -> None:
        raise NotImplementedError("engines of batch generation run until they are closed")

    def restart(self) -> None:
        try:
            reference = self._actor.restart.remote(self._number)
            self._ray.get(reference, timeout=START_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise EngineLostError(f"an engine does not start again: {error}") from error
        self._num_restarts += 1
        self._is_alive = True


def start_on_nodes(
    config: GenerationConfig,
    model_path: str,
    start: StartProcesses,
    *,
    num_batches: int,
    dtype: str,
) -> tuple[list[Rollout], Callable[[], None]]:
    """The engines of `trainer.nnodes` machines of a Ray cluster, and how to end them."""
    ray = require("ray", extra="ray")
    ending = ExitStack()
    if not ray.is_initialized():
        ending.callback(ray.shutdown)
        ray.init(**dict(config.ray_kwargs.ray_init))
    trainer, device = config.trainer, config.trainer.device
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0 and device in ("auto", "cuda")
    bundle = {"CPU": 1, **({"GPU": trainer.n_gpus_per_node} if has_gpus else {})}
    group = ray.util.placement_group([bundle] * trainer.nnodes, strategy="STRICT_SPREAD")
    ending.callback(ray.util.remove_placement_group, group)
    if not group.wait(CALL_SECONDS):
        num_machines = len(ray.nodes())
        ending.close()
        text = (
            f"trainer.nnodes is {trainer.nnodes}, and the Ray cluster of {num_machines} "
            f"machine(s) has not that many with {bundle} free each; start Ray on more machines, or "
            "lower trainer.nnodes or trainer.n_gpus_per_node"
        )
        raise ConfigError([Fault(text, ("trainer.nnodes", "trainer.n_gpus_per_node"))])
    counts = shares_of(num_batches, num_engines(config), trainer.nnodes)
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    actors = [
        ray.remote(NodeEngines)
        .options(
            num_cpus=1,
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy(group, placement_group_bundle_index=node),
        )
        .remote(
            start,
            config.rollout,
            model_path,
            count=count,
            device=device,
            dtype=dtype,
            trust_remote_code=config.model.trust_remote_code,
        )
        for node, count in enumerate(counts)
    ]

    def close() -> None:
        with ending:
            closed = [actor.close.remote() for actor in actors]
            ray.wait(closed, num_returns=len(actors), timeout=30.0)
            for actor in actors:
                ray.kill(actor)

    try:
        ray.get([actor.start.remote() for actor in actors], timeout=START_SECONDS)
    except ray.exceptions.RayTaskError as error:
        close()
        failure: Any = error
        raise (failure.cause or error) from None  # as engines of this machine would raise it
    except BaseException:
        close()
        raise
    engines: list[Rollout] = [
        EngineOnNode(actor, number)
        for actor, count in zip(actors, counts, strict=True)
        for number in range(count)
    ]
    return engines, close


def shares_of(num_batches: int, per_node: int, num_nodes: int) -> list[int]:
    """How many engines each machine runs: no more than batches, machines filled evenly."""
    total = min(num_batches, per_node * num_nodes)
    counts = [total // num_nodes + (node < total % num_nodes) for node in range(num_nodes)]
    return [count for count in counts if count]
