"""Engines in processes of their own, which divide the devices of this machine among them.

All of them are alike: they read the same weights from the disk. Each has its own devices, and its
own seeds for requests that bring none. Either all start or none is left.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from verl.config.faults import ConfigError, Fault
from verl.config.rollout import RolloutConfig
from verl.utils.device import get_visible_devices_keyword, torch_module_of
from verl.utils.environment import variable
from verl.workers.engine.spec import compute_dtype
from verl.workers.rollout.factory import EngineOrder, has_own_process, process_engines
from verl.workers.rollout.process.client import EngineProcess


def start_processes(
    rollout: RolloutConfig,
    model_path: str,
    *,
    count: int,
    device: str,
    dtype: str,
    trust_remote_code: bool,
) -> list[EngineProcess]:
    """`count` engines, started at the same time; whoever asks for them closes them.

    `dtype` is `auto` or the number format of the weights. `EngineStartError` if an engine does not
    come up, ValueError if it refuses its options.
    """
    build = process_engines[process_name(rollout.name)]
    shares = device_shares(device, count, rollout.tensor_model_parallel_size)
    orders = [
        EngineOrder(
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
    processes = [EngineProcess(build(order)) for order in orders]
    with ExitStack() as closing:
        for process in processes:
            closing.callback(process.close)
        with ThreadPoolExecutor(count) as pool:  # each start has a deadline of its own
            list(pool.map(EngineProcess.start, processes))
        closing.pop_all()
    return processes


def process_name(name: str) -> str:
    """What an engine is called that has a process of its own."""
    if name == "native":
        return "native_process"
    if not has_own_process(name):
        text = (
            f"rollout.name is {name!r}, which runs in this process, one engine alone; set "
            "trainer.n_gpus_per_node=1, or use rollout.name=native for several"
        )
        raise ConfigError([Fault(text, ("rollout.name",))])
    return name


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
