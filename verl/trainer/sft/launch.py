"""What the three SFT commands share: refuse what is wrong, print the plan, train, report.

A run is one process, or one of several that `torchrun` started and that meet in a process group;
`sft_trainer_ray` brings its own way to train. What loads torch is imported when training starts,
not when a mistake is reported. Only rank 0 prints.

Valid options that a supervised run cannot honour are refused by name before anything is loaded:
those that would change the result or the memory needed. Options that merely do nothing are reported
as unused at the end of a run. The plan for `trainer.dry_run` is read from the options alone.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.config import command
from verl.config.convert import to_dict
from verl.config.effects import idle_notices
from verl.config.engine import FSDPEngineConfig, McoreEngineConfig
from verl.config.faults import ConfigError, Fault, shown
from verl.config.load import Loaded, load_config
from verl.config.optimizer import FSDPOptimizerConfig, McoreOptimizerConfig
from verl.config.packages import megatron_problem
from verl.config.rm import RMConfig
from verl.config.roles import sequence_ranks
from verl.config.roles import world_size as configured_world_size
from verl.config.sft import EACH_EPOCH, SFTConfig, SFTEngineConfig
from verl.config.validate import validate
from verl.trainer.plan.model import model_faults
from verl.utils.checkpoint.layout import holding
from verl.utils.environment import EndsTheRun, choose_openmp, rank, world_size
from verl.utils.import_utils import is_available, lazy_attribute

AnySFTConfig = SFTConfig | SFTEngineConfig
Train = Callable[[Loaded], None]

SILENT_RANK_SECONDS = 1800.0
"""How long ranks wait for one that neither works nor dies, for example while it writes."""

_LAZY = {
    "SFTTrainer": "verl.trainer.sft.trainer:SFTTrainer",
    "RMTrainer": "verl.trainer.sft.reward_model:RMTrainer",
    "run_locks": "verl.trainer.sft.checkpoint:run_locks",
    "join": "verl.utils.distributed:initialize_global_process_group",
    "checked_layout": "verl.trainer.plan.megatron:checked_layout",
    "leave": "verl.utils.distributed:destroy_global_process_group",
}


def run_command(config: DictConfig, root: type[AnySFTConfig], train: Train) -> None:
    """What Hydra composed from a command line; a mistake ends the process without a traceback."""
    try:
        run(load_config(config, root, overrides=command.task_overrides()), train)
    except EndsTheRun as error:
        refuse(str(error), error.exit_code)


def run(loaded: Loaded, train: Train) -> None:
    """Say what was translated, refuse what is wrong, then print the plan or train."""
    say(loaded.notices)
    config: AnySFTConfig = loaded.config
    faults = validate(config, loaded.user_set, known_faults=loaded.faults)
    faults += [*unsupported(config), *model_faults(config)]
    if config.trainer.dry_run:
        faults = [fault for fault in faults if not fault.is_about_machine]
    if faults:
        raise ConfigError(faults)
    say(idle_notices(config, loaded.user_set))
    if config.trainer.dry_run:
        sys.stdout.write(f"{plan(config)}\n")
        return
    say(choose_openmp())
    train(loaded)


def train_here(loaded: Loaded) -> None:
    """Train in this process, as one of the ranks that `torchrun` started if it did."""
    with ExitStack() as stack:
        if rank() == 0:  # before anything is loaded
            locks = lazy_attribute(__name__, _LAZY, "run_locks")(loaded.config.trainer)
            stack.enter_context(holding(locks))
        _train_here(loaded.config)


def _train_here(config: AnySFTConfig) -> None:
    has_peers = world_size() > 1
    if has_peers:
        say([ranks_notice(config, world_size())])
        lazy_attribute(__name__, _LAZY, "join")(timeout_second=SILENT_RANK_SECONDS)
    kind = "RMTrainer" if isinstance(config, RMConfig) else "SFTTrainer"
    trainer = lazy_attribute(__name__, _LAZY, kind)(config)
    trainer.fit()
    lazy_attribute(__name__, _LAZY, "leave")()
    if rank() == 0:
        sys.stdout.write(f"{ending(trainer)}\n")


def ending(trainer: Any) -> str:
    """The last lines of a run."""
    weights = trainer.checkpoints.weights(trainer.summary.last_step)
    where = f"\nthe model is in {weights}" if weights.exists() else ""
    return f"{trainer.summary.text}{where}"


def ranks_notice(config: AnySFTConfig, num_ranks: int) -> str:
    """What several ranks have of the model and of the rows."""
    if isinstance(config, SFTEngineConfig) and isinstance(config.engine, McoreEngineConfig):
        layout = lazy_attribute(__name__, _LAZY, "checked_layout")
        return (
            f"{num_ranks} ranks divide the model: {layout(config.engine, num_ranks, config.model)}"
        )
    return (
        f"each of the {num_ranks} ranks holds the whole model and a share of the rows; weights are "
        "not sharded (fsdp and fsdp2 mean the same here)"
    )


def as_started(config: DictConfig | AnySFTConfig, root: type[AnySFTConfig]) -> DictConfig:
    """How many processes there are is decided by whoever started them, not by the configuration."""
    started = {"nnodes": 1, "n_gpus_per_node": world_size()}
    asked = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if asked not in (world_size(), root().trainer.n_gpus_per_node):
        say([f"the configuration says {asked} devices; this run was started on {world_size()}"])
    is_typed = isinstance(config, SFTConfig | SFTEngineConfig)
    merged = OmegaConf.merge(to_dict(config) if is_typed else config, {"trainer": started})
    assert isinstance(merged, DictConfig)
    return merged


def say(notices: list[str]) -> None:
    if rank() == 0:
        command.say(notices)


def refuse(message: str, exit_code: int = command.MISTAKE) -> None:
    """End every rank; one of them says why."""
    if rank() == 0:
        command.refuse(message, exit_code)
    raise SystemExit(exit_code)


ON_THE_DEVICE = "weights and optimizer stay on the device"
OF_EVERY_ENGINE = {
    "model.enable_activation_offload": "activations stay on the device",
    "engine.forward_only": "fine-tuning needs an optimizer",
}
OF_ENGINE = OF_EVERY_ENGINE | {
    "engine.param_offload": ON_THE_DEVICE,
    "engine.optimizer_offload": ON_THE_DEVICE,
    "engine.offload_policy": ON_THE_DEVICE,
}
"""Options that must be left at null or False, and why."""

NO_ADAPTERS = "megatron-core has no adapters (engine=fsdp has), all weights are trained"
OF_MEGATRON = OF_EVERY_ENGINE | {
    "model.lora_rank": NO_ADAPTERS,
    "model.lora.rank": NO_ADAPTERS,
    "model.lora_adapter_path": NO_ADAPTERS,
}


ALL_WEIGHTS = "a reward model is trained with all its weights"
OF_REWARD_MODEL = {
    "model.lora_rank": ALL_WEIGHTS,
    "model.lora.rank": ALL_WEIGHTS,
    "model.lora_adapter_path": ALL_WEIGHTS,
}


def unsupported(config: AnySFTConfig) -> Iterator[Fault]:
    """One fault for each option that cannot be honoured."""
    if isinstance(config, SFTEngineConfig):
        is_megatron = isinstance(config.engine, McoreEngineConfig)
        faults = list(engine_faults(config))
        yield from faults or refused(config, OF_MEGATRON if is_megatron else OF_ENGINE)
    if isinstance(config, RMConfig):
        yield from refused(config, OF_REWARD_MODEL)
    yield from frequency_faults(config)
    yield from lora_faults(config)
    yield from resume_faults(config)


def refused(config: AnySFTConfig, rules: dict[str, str]) -> Iterator[Fault]:
    for key, rule in rules.items():
        value = at(config, key)
        if value:
            yield Fault(f"{key} is {shown(value)}; {rule}: leave it out", (key,))


def engine_faults(config: SFTEngineConfig) -> Iterator[Fault]:
    engine, is_rm = config.engine, isinstance(config, RMConfig)
    pairs: list[tuple[type, type]] = [(FSDPEngineConfig, FSDPOptimizerConfig)]
    if not is_rm:
        pairs.append((McoreEngineConfig, McoreOptimizerConfig))
    if not any(isinstance(engine, of) and isinstance(config.optim, its) for of, its in pairs):
        others = "" if is_rm else ", or with engine=megatron optim=megatron"
        what = "a reward model trains" if is_rm else "fine-tuning runs"
        text = (
            f'engine.strategy is "{engine.strategy}" and the optimizer is '
            f"{type(config.optim).__name__}; {what} with engine=fsdp optim=fsdp{others}"
        )
        yield Fault(text, ("engine.strategy",))
    elif isinstance(engine, McoreEngineConfig) and megatron_problem() is None:
        yield from layout_faults(config, engine)


def layout_faults(config: SFTEngineConfig, engine: McoreEngineConfig) -> Iterator[Fault]:
    """Ranks that the sizes do not divide, which a plan may leave open, else a model that they do
    not."""
    ranks = configured_world_size(config)
    fits = ranks % sequence_ranks(config) == 0
    try:
        lazy_attribute(__name__, _LAZY, "checked_layout")(engine, ranks, config.model)
    except ConfigError as error:
        texts = [fault.text.replace("megatron: ", "engine: ", 1) for fault in error.faults]
        yield from (Fault(text, ("engine",), is_about_machine=not fits) for text in texts)


def frequency_faults(config: AnySFTConfig) -> Iterator[Fault]:
    for name in ("save_freq", "test_freq"):
        value = config.trainer[name]
        if isinstance(value, str) and value != EACH_EPOCH:
            text = f'trainer.{name} is "{value}"; it must be a number of steps or {EACH_EPOCH}'
            yield Fault(text, (f"trainer.{name}",))
    if isinstance(config, SFTEngineConfig) and len(config.trainer.profile_interval) != 2:
        key = "trainer.profile_interval"
        text = f"{key} is {at(config, key)}; it must be [first step, last step]"
        yield Fault(text, (key,))


def lora_faults(config: AnySFTConfig) -> Iterator[Fault]:
    rank = config.model.lora_rank
    if rank and not is_available("peft"):
        text = f'model.lora_rank is {rank}, but peft is not installed; pip install "verl[peft]"'
        yield Fault(text, ("model.lora_rank",), is_about_machine=True)


def resume_faults(config: AnySFTConfig) -> Iterator[Fault]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and "global_step_" not in str(trainer.resume_from_path):
        text = (
            f"trainer.resume_from_path is {shown(trainer.resume_from_path)}; with "
            "trainer.resume_mode=resume_path it must name a folder .../global_step_N"
        )
        yield Fault(text, ("trainer.resume_from_path",))


def at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name]
    return config


def plan(config: AnySFTConfig) -> str:
    """A line for each thing one wants to know before starting."""
    data, trainer = config.data, config.trainer
    steps = trainer.total_training_steps
    length = f"{steps} steps" if steps is not None else f"{trainer.total_epochs} epochs"
    lines = {
        "model": model_of(config),
        "trained": trained_of(config),
        "data": f"{data.train_files}: {columns_of(config)}",
        "batch": f"{data.train_batch_size} rows, {micro_batch_of(config)} at a time",
        "ranks": ranks_of(config),
        "length": f"{length}, at most {data.max_length} tokens a row",
        "optimizer": f"lr {config.optim.lr:g}, {schedule_of(config)}",
        "checkpoints": trainer.default_local_dir,
    }
    return "\n".join(f"{name:12}{value}" for name, value in lines.items())


def ranks_of(config: AnySFTConfig) -> str:
    ranks = configured_world_size(config)
    if not isinstance(config, SFTEngineConfig) or not isinstance(config.engine, McoreEngineConfig):
        return str(ranks)
    if ranks % sequence_ranks(config):
        return f"{ranks} here; the layout needs a multiple of {sequence_ranks(config)}"
    return ranks_notice(config, ranks)


def model_of(config: AnySFTConfig) -> str:
    is_engine = isinstance(config, SFTEngineConfig)
    return config.model.path if is_engine else config.model.partial_pretrain


def trained_of(config: AnySFTConfig) -> str:
    rank = config.model.lora_rank
    if isinstance(config, SFTEngineConfig):
        rank = rank or config.model.lora.rank
        if config.model.lora_adapter_path is not None:
            return f"the LoRA adapter in {config.model.lora_adapter_path}"
    return f"LoRA adapters of rank {rank}" if rank else "all weights"


def columns_of(config: AnySFTConfig) -> str:
    if isinstance(config, RMConfig):
        data = config.data
        pair = f"{data.prompt_key} -> {data.chosen_key} over {data.rejected_key}"
        return f"{pair}, objective {config.objective.name}"
    if isinstance(config, SFTEngineConfig):
        return f"conversations in {config.data.messages_key}"
    if config.data.multiturn.enable:
        return f"conversations in {config.data.multiturn.messages_key}"
    return f"{config.data.prompt_key} -> {config.data.response_key}"


def micro_batch_of(config: AnySFTConfig) -> str:
    is_engine = isinstance(config, SFTEngineConfig) and not isinstance(config, RMConfig)
    if is_engine and config.data.use_dynamic_bsz:
        return f"{config.data.max_token_len_per_gpu} tokens"
    return f"{config.data.micro_batch_size_per_gpu} rows"


def schedule_of(config: AnySFTConfig) -> str:
    if not isinstance(config, SFTEngineConfig):
        return config.optim.lr_scheduler
    is_megatron = isinstance(config.optim, McoreOptimizerConfig)
    return config.optim["lr_decay_style" if is_megatron else "lr_scheduler_type"]
