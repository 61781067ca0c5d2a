"""The engines of batch generation and of the server, over weights on disk.

One engine that needs only a Hugging Face module runs in this process. Several, and those of other
packages, run in processes of their own, each with its own devices and its own seeds for requests
without one. Either all of them start or none is left. `nodes` has those of several machines.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from verl.config.faults import ConfigError, Fault
from verl.config.generation import GenerationConfig
from verl.config.rollout import RolloutConfig
from verl.models.fuse import fuse_model
from verl.models.loading import load_causal_lm
from verl.trainer.generation.nodes import EngineOnNode, start_on_nodes
from verl.trainer.generation.plan import num_engines
from verl.utils.device import get_visible_devices_keyword, resolve_device, torch_module_of
from verl.utils.environment import WentWrong, variable
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.engine.spec import compute_dtype
from verl.workers.rollout.base import Rollout
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
