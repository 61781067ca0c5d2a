"""Fine-tune on prompts and responses: `python -m verl.trainer.fsdp_sft_trainer key=value ...`

Also starts under `torchrun --nproc_per_node 1`. What the configuration asks for and this version
does not do is refused before anything heavy is loaded.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from verl.config import command
from verl.config.base import ReadLog
from verl.config.convert import to_dict
from verl.config.effects import report_unread
from verl.config.faults import ConfigError, Fault
from verl.config.load import Loaded, load_config
from verl.config.sft import SFTConfig, SFTTrainerConfig
from verl.config.validate import validate
from verl.utils.environment import world_size
from verl.utils.exit_codes import EndsTheRun
from verl.utils.import_utils import lazy_attribute

CONFIG_NAME = "sft_trainer"
CONFIG_DIR = Path(__file__).parent / "config"
STARTED = {"trainer.nnodes", "trainer.n_gpus_per_node"}
"""Options that `as_started` sets."""

# What loads torch is imported when a run starts, not when a mistake is reported.
_LAZY = {"SFTTrainer": "verl.trainer.sft.trainer:SFTTrainer"}


def main(config: DictConfig | None = None) -> None:
    """The command; with a configuration, run that one instead of the command line's."""
    if config is not None:
        run_sft(config)
    else:
        command.run(from_hydra, CONFIG_NAME, CONFIG_DIR)


@hydra.main(config_path="config", config_name=CONFIG_NAME, version_base=None)
def from_hydra(config: DictConfig) -> None:
    try:
        run(load_config(as_started(config), SFTConfig, overrides=command.task_overrides()))
    except ConfigError as error:
        command.refuse(str(error))
    except EndsTheRun as error:
        command.refuse(str(error), error.exit_code)


def run_sft(config: DictConfig | SFTConfig) -> None:
    """Train with a composed configuration, for programs that have a `main` of their own."""
    run(load_config(as_started(config), SFTConfig, keeps_unknown=True))


def as_started(config: DictConfig | SFTConfig) -> DictConfig:
    """How many processes there are is decided by whoever started them, not by the configuration."""
    started = {"nnodes": 1, "n_gpus_per_node": world_size()}
    asked = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if asked not in (world_size(), SFTTrainerConfig().n_gpus_per_node):
        text = f"the configuration says {asked} devices; this run was started on {world_size()}"
        command.say([text])
    plain = to_dict(config) if isinstance(config, SFTConfig) else config
    merged = OmegaConf.merge(plain, {"trainer": started})
    assert isinstance(merged, DictConfig)
    return merged


def run(loaded: Loaded) -> None:
    """Say what was translated, refuse what is wrong, then train."""
    command.say(loaded.notices)
    config: SFTConfig = loaded.config
    faults = validate(config, loaded.user_set, known_faults=loaded.faults)
    faults += unsupported(config)
    if config.trainer.dry_run:
        faults = [fault for fault in faults if not fault.is_about_machine]
    if faults:
        raise ConfigError(faults)
    if config.trainer.dry_run:
        sys.stdout.write(f"{plan(config)}\n")
        return
    train(loaded)


def train(loaded: Loaded) -> None:
    """Run, then say where the model is and name the settings that nothing looked at."""
    config, log = loaded.config, ReadLog()
    log.attach(config)
    trainer = lazy_attribute(__name__, _LAZY, "SFTTrainer")(config)
    trainer.fit()
    command.say(report_unread(config, loaded.user_set - STARTED, log))
    sys.stdout.write(f"the model is in {trainer.checkpoints.weights(trainer.total_steps)}\n")


def unsupported(config: SFTConfig) -> Iterator[Fault]:
    """Options that would change the result and that nothing here implements."""
    model, fsdp = config.model, config.model.fsdp_config
    one_device = "fine-tuning runs on one device in this version"
    refusals = {
        "data.multiturn.enable": (config.data.multiturn.enable, "a row has one prompt and answer"),
        "model.lora_rank": (model.lora_rank, "all weights are trained"),
        "model.use_liger": (model.use_liger, "layers are those of transformers"),
        "model.fsdp_config.cpu_offload": (fsdp.cpu_offload, one_device),
        "model.fsdp_config.offload_params": (fsdp.offload_params, one_device),
        "trainer.default_hdfs_dir": (
            config.trainer.default_hdfs_dir, "checkpoints are written to a local folder"
        ),
    }  # fmt: skip
    for key, (value, rule) in refusals.items():
        if value:
            yield Fault(f"{key} is {value}; {rule}: leave it out", (key,))
    if config.ulysses_sequence_parallel_size > 1:
        key = "ulysses_sequence_parallel_size"
        yield Fault(f"{key} is {config[key]}; {one_device}: set it to 1", (key,))
    if world_size() > 1:
        text = f"started in {world_size()} processes; {one_device}: use --nproc_per_node 1"
        yield Fault(text, ("trainer.n_gpus_per_node",))


def plan(config: SFTConfig) -> str:
    data, optim, trainer = config.data, config.optim, config.trainer
    steps = trainer.total_training_steps
    length = f"{steps} steps" if steps is not None else f"{trainer.total_epochs} epochs"
    lines = {
        "model": config.model.partial_pretrain,
        "rows": f"{data.train_files}: {data.prompt_key} -> {data.response_key}",
        "batch": f"{data.train_batch_size} rows, {data.micro_batch_size_per_gpu} at a time",
        "length": f"{length}, at most {data.max_length} tokens a row",
        "optimizer": f"{optim.optimizer}, lr {optim.lr:g}, {optim.lr_scheduler}",
        "checkpoints": trainer.default_local_dir,
    }
    return "\n".join(f"{name:12}{value}" for name, value in lines.items())


if __name__ == "__main__":
    main()
