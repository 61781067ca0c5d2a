"""Whether this machine has what a configuration names: files, packages, devices, engines.

A dry run lists what is missing without refusing, since one may plan here for another machine.
Nothing heavy is imported to find out.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl.config.distillation import DistillationConfig, teachers_of
from verl.config.faults import Fault, nearest_path, shown
from verl.config.model import (
    DEFAULT_MODEL,
    ROPE_OVERRIDES,
    McoreModelConfig,
    mcore_override_config,
    rope_faults,
)
from verl.config.packages import (
    engine_argument_faults,
    engine_package_faults,
    megatron_package_faults,
)
from verl.config.ppo import PPOConfig
from verl.config.rm import RMConfig
from verl.config.roles import (
    ON_RAY,
    TRACKERS,
    needs_critic,
    needs_reference,
    ranks_beside,
    runs_prime,
    teacher_ranks,
    world_size,
)
from verl.config.sft import SFTConfig, SFTEngineConfig
from verl.utils.environment import use_modelscope
from verl.utils.user_files import BrokenFile, read_json_object, read_yaml

ROLLOUT = "actor_rollout_ref.rollout"
DEVICE_FILES = {
    "cuda": ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia", "/dev/kfd", "/dev/dxg"),
    "npu": ("/dev/davinci_manager", "/dev/davinci0"),
}
"""Of which at least one exists where there is such a device."""
DEVICE_PROFILERS = ("nsys", "npu", "torch_memory")
"""Tools that record nothing of a CPU."""
MODEL_FILES = (
    *("config.json", "generation_config.json", "adapter_config.json", "preprocessor_config.json"),
    *("tokenizer_config.json", "special_tokens_map.json"),
)
"""Of a model's folder: those that must hold a JSON object if they are there."""
LATER_NAMES = (*ROPE_OVERRIDES, "rope_theta", "attn_implementation")
"""Values that a model may have without stating them."""


def machine_faults(config: Any) -> Iterator[Fault]:
    yield from file_faults(config)
    yield from tracker_faults(config)
    yield from device_faults(config)
    yield from override_faults(config)
    if isinstance(config, PPOConfig):
        yield from tool_faults(config)
        yield from trace_faults(config)
        yield from engine_package_faults(config)
        yield from megatron_package_faults(config)
        yield from engine_argument_faults(config)
        yield from controller_faults(config)
        yield from profiler_faults(config)
    elif isinstance(config, SFTEngineConfig):
        yield from megatron_package_faults(config)


def file_faults(config: Any) -> Iterator[Fault]:
    for key, value in named_files(config):
        for name in value if isinstance(value, list) else [value]:
            if is_local(name) and not Path(name).expanduser().exists():
                yield absent(key, name)
    for key, name in named_models(config):
        yield from model_faults(key, name)


def model_faults(key: str, name: str) -> Iterator[Fault]:
    """A model that is named by its folder must be there; a hub is asked when it is loaded."""
    if name == DEFAULT_MODEL and not Path(name).expanduser().exists():
        text = f"{key} is required; set {key}=... to a folder or to a name on the hub"
        yield Fault(text, (key,), is_about_machine=True)
        return
    if use_modelscope() and not Path(name).expanduser().exists() and not find_spec("modelscope"):
        text = (
            f"{key} is {shown(name)} and VERL_USE_MODELSCOPE is set, but the package modelscope is "
            "not installed; pip install modelscope, or unset it"
        )
        yield Fault(text, (key,), is_about_machine=True)
        return
    folder = Path(name).expanduser()
    if looks_local(name) and not folder.exists():
        yield absent(key, name)
    for file in (folder / name for name in MODEL_FILES if (folder / name).exists()):
        try:
            read_json_object(file)
        except BrokenFile as error:
            yield Fault(f"{key}: {error}", (key,))


def absent(key: str, name: str) -> Fault:
    hint = nearest_path(Path(name).expanduser().absolute())
    text = f"{key} is {shown(name)}, which does not exist; {hint}"
    return Fault(text, (key,), is_about_machine=True)


def named_files(config: Any) -> Iterator[tuple[str, Any]]:
    """Each key that names a file the run reads, with its value."""
    if isinstance(config, PPOConfig):
        turns = config.actor_rollout_ref.rollout.multi_turn
        yield f"{ROLLOUT}.multi_turn.tool_config_path", turns.tool_config_path
        yield f"{ROLLOUT}.multi_turn.function_tool_path", turns.function_tool_path
        yield f"{ROLLOUT}.multi_turn.interaction_config_path", turns.interaction_config_path
        for name in ("tool_config_path", "function_tool_path"):
            if config.data[name] != turns[name]:  # else it follows
                yield f"data.{name}", config.data[name]
        loops = config.actor_rollout_ref.rollout.agent.agent_loop_config_path
        yield f"{ROLLOUT}.agent.agent_loop_config_path", loops
        yield "custom_reward_function.path", config.custom_reward_function.path
        yield "data.sampler.class_path", config.data.sampler.class_path
    if isinstance(config, PPOConfig | SFTConfig | SFTEngineConfig):
        yield "data.train_files", config.data.train_files
        yield "data.val_files", config.data.val_files
        yield "data.custom_cls.path", config.data.custom_cls.path
        yield "trainer.resume_from_path", config.trainer.resume_from_path
    elif "path" in config.data:
        yield "data.path", config.data.path


def tool_faults(config: PPOConfig) -> Iterator[Fault]:
    """Files that are there and list no tools, seen without importing what they name."""
    turns, path = config.actor_rollout_ref.rollout.multi_turn, f"{ROLLOUT}.multi_turn"
    lists = (
        (f"{path}.tool_config_path", turns.tool_config_path, "tools"),
        (f"{path}.interaction_config_path", turns.interaction_config_path, "interaction"),
    )
    for key, name, entries in lists:
        if name is None or not Path(name).expanduser().exists():
            continue
        try:
            content = read_yaml(Path(name).expanduser())
        except BrokenFile as error:
            yield Fault(f"{key}: {error}", (key,))
            continue
        listed = content.get(entries) if isinstance(content, dict) else None
        if not isinstance(listed, list) or not listed:
            text = f"{key} is {shown(name)}, which lists nothing below `{entries}:`"
            yield Fault(text, (key,))
    loops, key = config.actor_rollout_ref.rollout.agent, f"{ROLLOUT}.agent.agent_loop_config_path"
    if (name := loops.agent_loop_config_path) is not None and Path(name).expanduser().exists():
        yield from loop_file_faults(key, Path(name).expanduser())
    name = turns.function_tool_path
    file = Path(name).expanduser() if isinstance(name, str) and is_local(name) else None
    if file and file.is_file() and "function_tool" not in file.read_text(errors="replace"):
        key = f"{path}.function_tool_path"
        text = (
            f"{key} is {shown(name)}, which has no tools; decorate functions with "
            "@function_tool (from verl.tools.function_tool import function_tool)"
        )
        yield Fault(text, (key,))


def loop_file_faults(key: str, file: Path) -> Iterator[Fault]:
    try:
        loops = read_yaml(file)
    except BrokenFile as error:
        yield Fault(f"{key}: {error}", (key,))
        return
    if not isinstance(loops, list):
        yield Fault(f"{key} is {shown(str(file))}, which does not list agent loops", (key,))


def named_models(config: Any) -> Iterator[tuple[str, str]]:
    """Each key that names a model the run loads, with its value."""
    if isinstance(config, PPOConfig):
        yield "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
        reference = config.actor_rollout_ref.ref.model.path
        if needs_reference(config) and reference is not None:
            yield "actor_rollout_ref.ref.model.path", reference
        adapter = config.actor_rollout_ref.model.lora_adapter_path
        if adapter is not None:
            yield "actor_rollout_ref.model.lora_adapter_path", adapter
        if config.distillation.enabled:
            yield from named_teachers(config.distillation)
        same = config.critic.model.path == config.actor_rollout_ref.model.path
        if needs_critic(config) and not same:
            yield "critic.model.path", config.critic.model.path
        if config.reward_model.enable:
            yield "reward_model.model.path", config.reward_model.model.path
        if runs_prime(config) and config.reward_model.model.get("ref_path"):
            yield "reward_model.model.ref_path", config.reward_model.model.ref_path
    elif isinstance(config, SFTConfig):
        yield "model.partial_pretrain", config.model.partial_pretrain
    elif "model" in config:
        yield "model.path", config.model.path
        if isinstance(config, RMConfig) and config.objective.ref_path is not None:
            yield "objective.ref_path", config.objective.ref_path


def named_teachers(section: DistillationConfig) -> Iterator[tuple[str, str]]:
    try:
        teachers = teachers_of(section)
    except ValueError:  # named by `distillation_faults`
        return
    for name, teacher in teachers.items():
        if teacher.model_path is not None and not teacher.endpoint:  # there it is a name of theirs
            yield f"distillation.teacher_models.{name}.model_path", teacher.model_path


def is_local(name: Any) -> bool:
    """Whether a file name is a path here; `hdfs://` and `pkg://` are looked up elsewhere."""
    return isinstance(name, str) and "://" not in name


def looks_local(name: str) -> bool:
    """Whether a model's name is a path rather than a name on a hub (`Qwen/Qwen2.5-7B`)."""
    return name.startswith(("/", "./", "../", "~"))


def controller_faults(config: PPOConfig) -> Iterator[Fault]:
    controller = config.trainer.controller
    devices = world_size(config) + ranks_beside(config) + teacher_ranks(config)
    if ON_RAY.holds(config, config) and find_spec("ray") is None:
        way_out = 'pip install "verl[ray]"'
        if config.trainer.nnodes == 1:
            way_out += ", or trainer.controller=local"
        text = (
            f'trainer.controller is "{controller}", which for {devices} devices means '
            f"Ray, but Ray is not installed; {way_out}"
        )
        yield Fault(text, ("trainer.controller",), is_about_machine=True)


def trace_faults(config: PPOConfig) -> Iterator[Fault]:
    backend = config.actor_rollout_ref.rollout.trace.backend
    if backend not in (None, "file") and find_spec(backend) is None:
        key = f"{ROLLOUT}.trace.backend"
        text = (
            f"{key} is {shown(backend)}, but that package is not installed; pip install {backend}"
        )
        yield Fault(text, (key,), is_about_machine=True)


def profiler_faults(config: PPOConfig) -> Iterator[Fault]:
    profiler, device = config.actor_rollout_ref.actor.profiler, config.trainer.device
    if not profiler.enable or profiler.tool not in DEVICE_PROFILERS:
        return
    is_here = device == "auto" and not ON_RAY.holds(config, config)
    if device == "cpu" or (is_here and not any(map(has_device, DEVICE_FILES))):
        means = "" if device == "cpu" else ", which means cpu on this machine"
        text = (
            f"global_profiler.tool is {profiler.tool}, which records a device, and trainer.device "
            f"is {device}{means}; use global_profiler.tool=torch"
        )
        keys = ("global_profiler.tool", "trainer.device")
        yield Fault(text, keys, is_about_machine=True)


def has_device(kind: str) -> bool:
    return any(Path(name).exists() for name in DEVICE_FILES[kind])


def device_faults(config: Any) -> Iterator[Fault]:
    """A device that is asked for by name leaves files on its machine; with Ray that is another."""
    if "trainer" not in config or "device" not in config.trainer:
        return
    device = config.trainer.device
    is_elsewhere = isinstance(config, PPOConfig) and ON_RAY.holds(config, config)
    if device in DEVICE_FILES and not is_elsewhere and not has_device(device):
        text = (
            f"trainer.device is {shown(device)}, but this machine has none; use "
            "trainer.device=auto or cpu"
        )
        yield Fault(text, ("trainer.device",), is_about_machine=True)


def override_faults(config: Any) -> Iterator[Fault]:
    """Overrides that a model's `config.json` refuses; names that no model has are refused by
    `verl.trainer.plan.model`, which knows them all."""
    for section, path in model_sections(config):
        try:
            of_model = read_json_object(Path(section.path).expanduser() / "config.json")
        except BrokenFile:  # not there, or named by `model_faults`
            continue
        is_policy = path == "actor_rollout_ref.model"
        for name, value in section.override_config.items():
            key = f"{path}.override_config.{name}"
            is_megatrons = is_policy and name in mcore_override_config()
            if is_megatrons and not isinstance(section, McoreModelConfig):
                text = f"{key} is an option of strategy=megatron; leave it out"
                yield Fault(text, (key,))
            if name in ROPE_OVERRIDES and isinstance(value, dict):
                rope = next((of_model[one] for one in ROPE_OVERRIDES if of_model.get(one)), {})
                yield from (Fault(f"{key}.{text}", (key,)) for text in rope_faults(value, rope))


def model_sections(config: Any) -> Iterator[tuple[Any, str]]:
    if isinstance(config, PPOConfig):
        yield config.actor_rollout_ref.model, "actor_rollout_ref.model"
        if needs_critic(config):
            yield config.critic.model, "critic.model"
        if config.reward_model.enable:
            yield config.reward_model.model, "reward_model.model"
    elif isinstance(config, SFTEngineConfig):
        yield config.model, "model"


def tracker_faults(config: Any) -> Iterator[Fault]:
    if "trainer" not in config or "logger" not in config.trainer:
        return
    for tracker in config.trainer.logger:
        package = TRACKERS.get(tracker)
        if package is not None and find_spec(package) is None:
            text = (
                f"trainer.logger has {shown(tracker)}, but the package {package} is not installed; "
                f'pip install {package}, or use trainer.logger=["console"]'
            )
            yield Fault(text, ("trainer.logger",), is_about_machine=True)
