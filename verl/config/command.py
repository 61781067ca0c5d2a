"""A command line between the user and Hydra.

    argv -> rewrite -> Hydra composes -> task(config) -> load, validate, run

Hydra insists on `+` for a key that a YAML file lacks, and knows nothing of old spellings or of our
schema. So before Hydra sees the arguments, options of ours get the prefix that always works (`++`),
old keys become today's, and an unknown key is refused with the one that was probably meant. Hydra's
own flags and config groups pass through. A mistake ends in exit code 2 with a message and without
a traceback; torch is not imported on the way.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl.config.base import BaseConfig
from verl.config.convert import unknown_text
from verl.config.faults import ConfigError, Fault
from verl.config.legacy import is_old, renamed
from verl.config.load import Loaded, load_config
from verl.config.schema import FILE_ROOTS, Keys, family
from verl.utils.environment import EndsTheRun, memory_hint, set_variable

FLAGS_WITH_VALUE = {
    "--config-path": "path",
    "-cp": "path",
    "--config-name": "name",
    "-cn": "name",
    "--config-dir": "dir",
    "-cd": "dir",
    "--package": "package",
    "-p": "package",
    "--cfg": "cfg",
    "-c": "cfg",
    "--experimental-rerun": "rerun",
}
LEAVES_NOTHING_BEHIND = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
MISTAKE = 2
INTERRUPTED = 130
"""As shells report a command that SIGINT has ended."""

OF_HYDRAS_GRAMMAR = re.compile(r"""[\[\]{}()"'\\]|^[\w./:+-]*$""", re.ASCII)
HELP = """\
usage: {command} key=value [key=value ...]

  trainer.dry_run=True                check the configuration, print the plan, stop
  --cfg job                           print the composed configuration with its defaults
  --config-path=$PWD --config-name=X  read X.yaml, a file of yours (docs/config.md shows one)
  --hydra-help                        the flags of Hydra

docs/config.md describes every key; the defaults are in verl/trainer/config/{default_config}.yaml.
"""


@dataclass
class Rewritten:
    """The arguments for Hydra, and what to say about them."""

    arguments: list[str] = field(default_factory=list)
    renames: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Override:
    """One `key=value` argument in its parts; `prefix` is "", "+", "++" or "~"."""

    prefix: str
    key: str
    value: str | None

    @classmethod
    def parse(cls, text: str) -> "Override":
        head, is_assigned, value = text.partition("=")
        key = head.lstrip("+~")
        return cls(head[: len(head) - len(key)], key, value if is_assigned else None)

    def quoted(self) -> "Override":
        """With quotes around a value that Hydra's grammar has no words for, such as `data/über.csv`
        or `day=1/train.parquet`; a value with brackets, quotes or backslashes is left to Hydra."""
        if self.value is None or OF_HYDRAS_GRAMMAR.search(self.value):
            return self
        try:
            OverridesParser.create().parse_override(f"{self.key}={self.value}")
        except HydraException:
            return replace(self, value=f'"{self.value}"')
        return self

    def written(self, prefix: str, key: str) -> str:
        return f"{prefix}{key}" if self.value is None else f"{prefix}{key}={self.value}"


def run(
    task: Callable[[], None],
    default_config: str,
    config_dir: Path,
    *,
    options: Sequence[str] | None = None,
) -> None:
    """Run a `@hydra.main` function on the rewritten command line; mistakes end the process.

    A command with `options` of its own starts from `default_config`, whatever the task names.
    """
    rewritten = Rewritten()
    HydraConfig.instance().cfg = None  # forget the job of an earlier run in this process
    set_variable("HYDRA_FULL_ERROR", "1")  # Hydra raises, so that we choose message and exit code
    if {"--help", "-h"} & set(sys.argv[1:]):
        sys.stdout.write(HELP.format(command=command_name(), default_config=default_config))
        return
    try:
        arguments = sys.argv[1:]
        if options is not None:
            arguments = with_options(arguments, options, default_config)
        rewritten = rewrite(arguments, default_config, config_dir)
        say(f"{old} is now {new}" for old, new in rewritten.renames.items())
        if rewritten.faults:
            raise ConfigError(rewritten.faults)
        sys.argv[1:] = rewritten.arguments
        task()
    except ConfigError as error:
        refuse(str(error))
    except KeyboardInterrupt:
        refuse("interrupted", INTERRUPTED)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        if HydraConfig.initialized():  # the task was running: not a mistake of the command line
            raise
        refuse("\n".join([*hydra_message(error), *rewritten.doubtful]))


def command_name() -> str:
    """How the user started this command: `verl train` or `python -m verl.trainer.main_ppo`."""
    spec = sys.modules["__main__"].__spec__
    is_short = sys.argv[0].startswith("verl ")
    return sys.argv[0] if is_short or spec is None else f"python -m {spec.name}"


def rewrite(arguments: list[str], default_config: str, config_dir: Path) -> Rewritten:
    """Translate the user's arguments into those that Hydra needs."""
    if {"--shell-completion", "-sc"} & set(arguments):
        return Rewritten(list(arguments))
    flags, overrides = split(arguments)
    name = flags.get("name", default_config).removesuffix(".yaml")
    root = FILE_ROOTS.get(name, FILE_ROOTS[default_config])
    is_listed = name in FILE_ROOTS and "dir" not in flags
    is_ours = is_listed and flags.get("path") in (None, "config")
    result = Rewritten()
    for argument in arguments:
        if argument in overrides:
            rewrite_override(Override.parse(argument).quoted(), root, is_ours, config_dir, result)
        else:
            result.arguments.append(argument)
    result.faults += conflicts(result, overrides)
    if is_dry_run(result.arguments) and "cfg" not in flags:
        given = {Override.parse(argument).key for argument in overrides}
        quiet = [one for one in LEAVES_NOTHING_BEHIND if Override.parse(one).key not in given]
        result.arguments += quiet
    return result


def with_options(arguments: list[str], options: Sequence[str], default_config: str) -> list[str]:
    """The arguments with a file and options before the user's, so that theirs come last."""
    flags, overrides = split(arguments)
    first = arguments.index(overrides[0]) if overrides else len(arguments)
    named = [] if "name" in flags else [f"--config-name={default_config}"]
    return [*named, *arguments[:first], *options, *arguments[first:]]


def split(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Hydra's flags with their values, and the overrides."""
    flags: dict[str, str] = {}
    overrides: list[str] = []
    pending = iter(arguments)
    for argument in pending:
        flag, is_assigned, value = argument.partition("=")
        if flag in FLAGS_WITH_VALUE:
            flags[FLAGS_WITH_VALUE[flag]] = value if is_assigned else next(pending, "")
        elif argument.startswith("~") or ("=" in argument and not argument.startswith("-")):
            overrides.append(argument)
    return flags, overrides


def rewrite_override(
    override: Override,
    root: type[BaseConfig],
    is_ours: bool,
    config_dir: Path,
    result: Rewritten,
) -> None:
    keys = family(root).keys
    key = override.key
    unchanged = override.written(override.prefix, key)
    if override.prefix == "~" or is_for_hydra(key, config_dir):
        result.arguments.append(unchanged)
    elif key in keys or is_old(key, keys):
        today = renamed(key, keys) or key
        if today != key:
            result.renames[key] = today
        result.arguments.append(override.written("++", today))
    elif override.prefix or not is_ours:
        result.arguments.append(unchanged)
        if not override.prefix:
            result.doubtful.append(unknown_text(key, keys))
    else:
        result.faults.append(Fault(refusal(key, keys), (key,)))


def refusal(key: str, keys: Keys) -> str:
    return f"{unknown_text(key, keys)} (to add a key of your own, write +{key}=...)"


def is_for_hydra(key: str, config_dir: Path) -> bool:
    """Hydra's own settings and config groups: `hydra.run.dir`, `engine=megatron`, `a@b=c`."""
    is_setting = key == "hydra" or key.startswith(("hydra.", "hydra/"))
    return is_setting or "@" in key or "/" in key or (config_dir / key).is_dir()


def conflicts(result: Rewritten, overrides: list[str]) -> Iterator[Fault]:
    """An old key and today's with different values."""
    today = {Override.parse(one).key: Override.parse(one).value for one in overrides}
    for old, new in result.renames.items():
        if new in today and today[new] != today[old]:
            text = (
                f"{old} is now {new}, but both are set: {today[old]} and {today[new]}; remove one"
            )
            yield Fault(text, (old, new))


def is_dry_run(arguments: list[str]) -> bool:
    last = [one for one in arguments if Override.parse(one).key == "trainer.dry_run"][-1:]
    return any(str(Override.parse(one).value).lower() in ("true", "1") for one in last)


def task_overrides() -> list[str]:
    """The overrides of the running Hydra job, for `load_config`."""
    job: Any = HydraConfig.instance().cfg
    return [] if job is None else list(job.hydra.overrides.task)


def hydra_message(error: BaseException) -> list[str]:
    """Hydra's message without the lines that describe its internals."""
    lines = []
    for part in (error, error.__cause__):
        if part is not None:
            lines += [line.rstrip() for line in str(part).splitlines()]
    hidden = ("full_key:", "object_type=", "reference_type=")
    return [line for line in dict.fromkeys(lines) if line and not line.strip().startswith(hidden)]


def say(notices: Iterable[str]) -> None:
    for notice in notices:
        sys.stderr.write(f"note: {notice}\n")


def load_and_run(
    config: DictConfig, schema: type[BaseConfig], task: Callable[[Loaded], None]
) -> None:
    """Give `task` what Hydra composed. What it refuses ends the process with a message."""
    try:
        task(load_config(config, schema, overrides=task_overrides()))
    except EndsTheRun as error:
        refuse(str(error), error.exit_code)
    except Exception as error:
        hint = memory_hint(error)
        if hint is not None:  # before the traceback, which may not name it
            sys.stderr.write(f"error: {hint}\n")
        raise


def refuse(message: str, exit_code: int = MISTAKE) -> NoReturn:
    """End the process with a message instead of a traceback."""
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(exit_code)
