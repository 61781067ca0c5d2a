"""Check this machine, and optionally a configuration: `python -m verl.doctor [key=value ...]`.

Each check prints a state, what was found, and the remedy. Nothing is changed or downloaded. The
exit code is 1 if something that training needs is missing, or if the given arguments of
`verl.trainer.main_ppo` would be refused on this machine.
"""

import argparse
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.text import Text
from yaml import MarkedYAMLError

from verl.config.effects import without_effect
from verl.config.load import load_config
from verl.config.packages import installed_version
from verl.config.ppo import PPOConfig
from verl.config.roles import ROLLOUTS
from verl.config.validate import validate
from verl.trainer.plan.layout import row_faults
from verl.trainer.plan.megatron import layout_faults
from verl.utils.environment import cache_folder, sglang_python, usable_cores, vllm_python
from verl.utils.py_functional import printable

OK, NOTE, BAD = "ok", "note", "error"
STYLES = {OK: "green", NOTE: "yellow", BAD: "red"}
MIN_OPEN_FILES = 4096
MIN_SHARED_BYTES = 1 << 30
MIN_FREE_BYTES = 10 << 30
OPTIONAL = {
    "ray": "several devices or machines",
    "peft": "LoRA",
    "math_verify": "integrals, sums and limits in mathematical answers",
    "fastapi": "serving models, agent programs",
    "mcp": "tools of MCP servers",
    "datasets": "preparing data sets",
    "matplotlib": "plots",
    "tensorboard": "trainer.logger=[tensorboard]",
    "wandb": "trainer.logger=[wandb]",
}
EXTRA_OF = {
    "math_verify": "math", "fastapi": "server", "mcp": "agents", "datasets": "data",
    "matplotlib": "plot", "tensorboard": "track", "wandb": "track",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    name: str
    state: str
    found: str
    remedy: str = ""


def check_python() -> Iterator[Finding]:
    version = sys.version.split()[0]
    state = OK if sys.version_info >= (3, 10) else BAD
    yield Finding("Python", state, version, "" if state == OK else "install Python 3.10 or newer")


def check_requirements() -> Iterator[Finding]:
    """Every package that verl always needs, in a version that it supports."""
    for text in metadata.requires("verl") or ():
        requirement = Requirement(text)
        if requirement.marker is not None:  # of an extra
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield Finding(requirement.name, BAD, "not installed", f'pip install "{requirement}"')
            continue
        if requirement.specifier.contains(Version(version), prereleases=True):
            if requirement.name in ("torch", "transformers"):
                yield Finding(requirement.name, OK, version)
        else:
            yield Finding(requirement.name, BAD, version, f'pip install "{requirement}"')


def check_device() -> Iterator[Finding]:
    from verl.utils.device import get_device_name, get_torch_device  # noqa: PLC0415 - needs torch

    kind = get_device_name()
    if kind == "cpu":
        remedy = "train on the CPU: trainer.device=cpu (trainer.n_gpus_per_node counts processes)"
        yield Finding("GPU", NOTE, "none, or torch is built without support for it", remedy)
        return
    devices = get_torch_device()
    for index in range(devices.device_count()):
        free, total = devices.mem_get_info(index)
        name = f"{devices.get_device_name(index)}, {free >> 30} of {total >> 30} GiB free"
        busy = free < total * 0.8
        remedy = "another process uses its memory" if busy else ""
        yield Finding(f"{kind} {index}", NOTE if busy else OK, name, remedy)
    has_triton = find_spec("triton") is not None
    remedy = "" if has_triton else "pip install triton: without it the fused kernels are not used"
    yield Finding("Triton", OK if has_triton else NOTE, "there" if has_triton else "none", remedy)


def check_collectives() -> Iterator[Finding]:
    import torch.distributed as dist  # noqa: PLC0415 - the checks before it must work without

    backends = [
        name
        for name, is_there in (
            ("gloo", dist.is_available() and dist.is_gloo_available()),
            ("nccl", dist.is_available() and dist.is_nccl_available()),
        )
        if is_there
    ]
    state = OK if "gloo" in backends else BAD
    remedy = "" if state == OK else "several ranks need a torch with gloo"
    yield Finding("collectives", state, ", ".join(backends) or "none", remedy)


def check_system() -> Iterator[Finding]:
    cores = usable_cores()
    yield Finding("cores", OK if cores > 1 else NOTE, str(cores))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < MIN_OPEN_FILES
    remedy = f"ulimit -n {min(hard, 65536)}: many environments and engines need more" if few else ""
    yield Finding("open files", NOTE if few else OK, str(soft), remedy)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        small = free < MIN_SHARED_BYTES
        remedy = "start the container with --shm-size=8g: weights go to engines there"
        text = f"{free / 2**30:.1f} GiB free"
        yield Finding("/dev/shm", NOTE if small else OK, text, remedy if small else "")
    for name, folder in (("work folder", Path.cwd()), ("cache", cache_folder())):
        yield from check_folder(name, folder)


def check_folder(name: str, folder: Path) -> Iterator[Finding]:
    """Whether files can be written there, and how many."""
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Finding(name, BAD, f"{folder}: {error.strerror}", "choose a folder that is yours")
        return
    free = shutil.disk_usage(folder).free
    small = free < MIN_FREE_BYTES
    text = f"{folder}: {free / 2**30:.0f} GiB free"
    yield Finding(name, NOTE if small else OK, text, "checkpoints need room" if small else "")


def check_sandbox() -> Iterator[Finding]:
    from verl.utils.sandbox.sandbox import check_available  # noqa: PLC0415 - Linux only

    try:
        check_available()
    except (OSError, RuntimeError, ValueError) as error:
        remedy = "programs cannot be graded here; use sandbox_fusion.url"
        yield Finding("sandbox", NOTE, str(error).splitlines()[0], remedy)
        return
    yield Finding("sandbox", OK, "available (programs written by a model run in it)")


def check_engines() -> Iterator[Finding]:
    """Rollout engines of other packages; the built-in one needs nothing."""
    own = {"vllm": vllm_python(), "sglang": sglang_python()}
    for name, traits in ROLLOUTS.items():
        if traits.package is None:
            continue
        python = own[name]
        if python is None and find_spec(traits.package) is None:
            yield Finding(
                name,
                NOTE,
                "not installed",
                "optional; the built-in engine (rollout.name=native) needs no package",
            )
            continue
        version = installed_version(traits.package, python)
        where = f"{version or 'none'} in {python or sys.executable}"
        wanted = Requirement(f"{traits.package}{traits.versions}").specifier
        fits = version is not None and wanted.contains(version, prereleases=True)
        remedy = "" if fits else f"supported: {traits.versions or 'any'}"
        yield Finding(name, OK if fits else NOTE, where, remedy)


def check_optional() -> Iterator[Finding]:
    for package, purpose in OPTIONAL.items():
        if find_spec(package) is None:
            remedy = f'pip install "verl[{EXTRA_OF.get(package, package)}]"'
            yield Finding(package, NOTE, f"not installed ({purpose})", remedy)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_requirements,
    check_device,
    check_collectives,
    check_system,
    check_sandbox,
    check_engines,
    check_optional,
)


def check_configuration(overrides: Sequence[str]) -> Iterator[Finding]:
    """What `verl.trainer.main_ppo` would refuse or ignore of these options on this machine."""
    try:
        loaded = load_config(OmegaConf.from_dotlist(list(overrides)), PPOConfig)
    except OmegaConfBaseException as error:
        yield Finding("configuration", BAD, str(error).partition("\n")[0], "write key=value")
        return
    except MarkedYAMLError as error:
        found = f"a value is no YAML: {error.problem}"
        yield Finding("configuration", BAD, found, "quote it, or close what it opens")
        return
    config = loaded.config
    faults = validate(config, loaded.user_set, known_faults=loaded.faults)
    faults += [*row_faults(config), *layout_faults(config)]
    for fault in faults:
        found, _, remedy = fault.text.partition("; ")
        yield Finding(fault.keys[0] if fault.keys else "configuration", BAD, found, remedy)
    for key, reason in without_effect(config, loaded.user_set):
        yield Finding(key, NOTE, f"has no effect: {reason}", "leave it out")
    for notice in loaded.notices:
        yield Finding("configuration", NOTE, notice)
    if not faults:
        counted = f"{len(loaded.user_set)} settings, none is refused"
        yield Finding("configuration", OK, counted, "trainer.dry_run=True prints the plan")


def findings(overrides: Sequence[str] = ()) -> Iterator[Finding]:
    for check in CHECKS:
        yield from check()
    if overrides:
        yield from check_configuration(overrides)


def main(arguments: list[str] | None = None, console: Console | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl.doctor", description=__doc__)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="options of a run, to check those too"
    )
    options = parser.parse_args(arguments)
    console = console or Console(highlight=False)
    counts = Counter[str]()
    for finding in findings(options.overrides):
        counts[finding.state] += 1
        show(finding, console)
    errors = counts[BAD]
    verdict = f"{errors} errors" if errors else "no errors"
    console.print(Text(f"\n{verdict}, {counts[NOTE]} notes", style=STYLES[BAD if errors else OK]))
    return int(errors > 0)


def show(finding: Finding, console: Console) -> None:
    """One line for what was found, one below it for the remedy."""
    mark = Text(f"{finding.state:7}", style=STYLES[finding.state])
    name, found = printable(finding.name), printable(finding.found)
    is_told = found.startswith((name, f"unknown option {name}"))
    text = found if is_told else f"{name:13} {found}"
    console.print(mark + Text(text), soft_wrap=True)
    if finding.remedy:
        console.print(Text(f"{'':7}-> {printable(finding.remedy)}"), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
