"""Fine-tune on Ray: `python -m verl.trainer.sft_trainer_ray trainer.n_gpus_per_node=2 key=value`

The options are those of `sft_trainer`. This process is the driver: it starts a rank per device in
the cluster (`trainer.nnodes` times `trainer.n_gpus_per_node`; worker processes on a CPU), each of
which runs the same loop as under `torchrun`, and calls them step by step.
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from verl.config import command
from verl.config.convert import to_dict
from verl.config.load import Loaded, load_config
from verl.config.roles import world_size
from verl.config.sft import SFTEngineConfig
from verl.trainer.sft.launch import ranks_notice, run, run_command
from verl.utils.environment import ending_of
from verl.utils.import_utils import lazy_attribute, require

CONFIG_NAME = "sft_trainer_engine"
CONFIG_DIR = Path(__file__).parent / "config"

_LAZY = {
    "SFTWorker": "verl.trainer.sft.trainer:SFTWorker",
    "Termination": "verl.trainer.common:Termination",
    "WorkerError": "verl.single_controller:WorkerError",
    "resolve_device": "verl.utils.device:resolve_device",
    "runtime_env": "verl.trainer.constants_ppo:get_ppo_ray_runtime_env",
}


def main(config: DictConfig | None = None) -> None:
    """The command; with a configuration, run that one instead of the command line's."""
    if config is not None:
        run_sft(config)
    else:
        command.run(from_hydra, CONFIG_NAME, CONFIG_DIR)


@hydra.main(config_path="config", config_name=CONFIG_NAME, version_base=None)
def from_hydra(config: DictConfig) -> None:
    run_command(config, SFTEngineConfig, train_on_ray)


def run_sft(config: DictConfig | SFTEngineConfig) -> None:
    """Train with a composed configuration, for programs that have a `main` of their own."""
    run(load_config(config, SFTEngineConfig, keeps_unknown=True), train_on_ray)


def train_on_ray(loaded: Loaded) -> None:
    """Start the ranks, take them through the run, and say how it went."""
    config: SFTEngineConfig = loaded.config
    if world_size(config) > 1:
        command.say([ranks_notice(config, world_size(config))])
    ray = require("ray", "ray")
    with ExitStack() as ending:
        if not ray.is_initialized():
            ending.callback(ray.shutdown)
            ray.init(runtime_env=lazy_attribute(__name__, _LAZY, "runtime_env")())
        said = take_through(start_ranks(config, ending))
    sys.stdout.write(f"{said}\n")


def take_through(group: Any) -> str:
    """The run, step by step; what rank 0 says at its end."""
    try:
        group.start()
        with lazy_attribute(__name__, _LAZY, "Termination")() as termination:
            while group.advance(termination.is_requested)[0] is not None:
                pass
        return group.finish()[0]
    except lazy_attribute(__name__, _LAZY, "WorkerError") as error:
        ending = ending_of(error)
        if ending is not None:
            raise ending from None
        raise


def start_ranks(config: SFTEngineConfig, ending: ExitStack) -> Any:
    """A worker group with a rank per device of the cluster, which ends with `ending`."""
    rayc = require("verl.single_controller.ray", "ray")
    device = lazy_attribute(__name__, _LAZY, "resolve_device")(config.trainer.device)
    pool = rayc.RayResourcePool(
        [config.trainer.n_gpus_per_node] * config.trainer.nnodes,
        use_gpu=device != "cpu",
        max_colocate_count=1,
    )
    ending.callback(pool.release)
    worker = lazy_attribute(__name__, _LAZY, "SFTWorker")
    spec = rayc.RayClassWithInitArgs(worker, to_dict(config))
    group = rayc.RayWorkerGroup(pool, spec, device_name=device)
    ending.callback(group.shutdown)
    return group


if __name__ == "__main__":
    main()
