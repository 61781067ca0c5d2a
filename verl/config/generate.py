"""Write the YAML files and the reference page from the dataclasses, or check that they are current.

python -m verl.config.generate            writes what changed
python -m verl.config.generate --check    fails when a file differs from what would be written

`docs/config.md` lists every option with type, default, rule and meaning. A command has one table
per section. Sections that occur in several places (optimizers, engines, profilers) have one table
at the end, and the places name what differs there.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin

from verl.config.actor_parts import RouterReplayConfig
from verl.config.base import Absent, BaseConfig, When, is_option
from verl.config.effects import KeyPart
from verl.config.engine import FSDPEngineConfig, McoreEngineConfig, VeOmniEngineConfig
from verl.config.model import McoreLoraConfig, MtpConfig
from verl.config.optimizer import FSDPOptimizerConfig, McoreOptimizerConfig, VeOmniOptimizerConfig
from verl.config.ppo import PPOConfig
from verl.config.profiler import ProfilerConfig
from verl.config.schema import ROOTS, default_tree, type_hints, union_members
from verl.config.trainer import CheckpointConfig
from verl.config.yaml_files import COMMAND, HEADER, inline, rendered_files, sentences, summary

REPOSITORY = Path(__file__).resolve().parents[2]
YAML_FOLDER = Path("verl/trainer/config")
PAGE = Path("docs/config.md")
SHARED: tuple[type[BaseConfig], ...] = (
    MtpConfig,
    McoreLoraConfig,
    FSDPOptimizerConfig,
    McoreOptimizerConfig,
    VeOmniOptimizerConfig,
    FSDPEngineConfig,
    McoreEngineConfig,
    VeOmniEngineConfig,
    CheckpointConfig,
    RouterReplayConfig,
    ProfilerConfig,
)
SIGNS = {"minimum": "≥", "above": ">", "maximum": "≤"}
# Sections that are a section of `ppo_trainer` again; the Megatron variant is so throughout.
LIKE = {
    ("sft_trainer_engine", "model"): "actor_rollout_ref.model",
    ("rm_trainer", "model"): "actor_rollout_ref.model",
    ("generation", "rollout"): "actor_rollout_ref.rollout",
}
COMMANDS = {
    "ppo_trainer": "`python -m verl.trainer.main_ppo`",
    "ppo_megatron_trainer": "`python -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer`, "
    "or `actor_rollout_ref.actor.strategy=megatron`.",
    "sft_trainer": "`torchrun -m verl.trainer.fsdp_sft_trainer`",
    "sft_trainer_engine": "`torchrun -m verl.trainer.sft_trainer`, "
    "`python -m verl.trainer.sft_trainer_ray`",
    "rm_trainer": "`python -m verl.trainer.main_rm`, `torchrun -m verl.trainer.main_rm`",
    "evaluation": "`python -m verl.trainer.main_eval`",
    "generation": "`python -m verl.trainer.main_generation`",
}


@cache
def wanted_files() -> dict[Path, str]:
    """Every generated file with its text, by its path in the repository."""
    files = {YAML_FOLDER / name: text for name, text in rendered_files().items()}
    return files | {PAGE: rendered_page()}


def stale_files(repository: Path) -> list[Path]:
    """Files that are missing, that differ, or that were generated once and are not any more."""
    wanted = wanted_files()
    stale = [path for path, text in wanted.items() if current_text(repository / path) != text]
    for path in sorted((repository / YAML_FOLDER).rglob("*.yaml")):
        inside = path.relative_to(repository)
        if inside not in wanted and path.read_text().startswith(HEADER):
            stale.append(inside)
    return stale


def current_text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def write_files(repository: Path) -> list[Path]:
    """Bring every generated file up to date; returns those that changed."""
    stale, wanted = stale_files(repository), wanted_files()
    for path in stale:
        if path in wanted:
            (repository / path).parent.mkdir(parents=True, exist_ok=True)
            (repository / path).write_text(wanted[path])
        else:
            (repository / path).unlink()
    return stale


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail when stale")
    if not parser.parse_args(arguments).check:
        for path in write_files(REPOSITORY):
            sys.stdout.write(f"wrote {path}\n")
        return 0
    stale = stale_files(REPOSITORY)
    for path in stale:
        sys.stdout.write(f"{path} is not what the dataclasses say; run {COMMAND}\n")
    return 1 if stale else 0


# Sections too large for one table: their parts have tables of their own.
SPLIT_SECTIONS = ("", "actor_rollout_ref")
INTRODUCTION = """\
<!-- Written by `python -m verl.config.generate` from verl/config; change it there. -->
# Configuration

Every option is listed here with its type, default, rule and meaning. The same sentences stand as
comments in the YAML files under `verl/trainer/config`.

**Setting options.** Options are set on the command line, by their path:

```bash
python -m verl.trainer.main_ppo \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    algorithm.adv_estimator=grpo \\
    actor_rollout_ref.rollout.n=8 \\
    trainer.logger='["console","wandb"]'        # quotes keep the list from the shell
```

or in a file of your own, `my_run.yaml`, which starts from ours and changes what it names. Run it
from the repository's root with `--config-path=$PWD --config-name=my_run`:

```yaml
hydra:
  searchpath: [file://verl/trainer/config]
defaults: [ppo_trainer, _self_]
data:
  train_batch_size: 256
```

Add an option that does not exist, for code of your own, with `+section.key=value`.

**Mistakes are refused.** A key that does not exist stops the run before anything is loaded and
names the key that was probably meant; so does a value of the wrong type, outside its rule, or at
odds with another option. All mistakes are reported at once. Keys of older versions are translated
with a notice.

**Each option is true.** It has an effect; or it has none in this run, and then the start of the run
and the plan name it with the reason; or what it asks for does not exist here, and then the run is
refused in one line before a model is loaded (exit code 2). Values that equal the default are never
reported. The tables have *Refused* and *No effect* where that depends on nothing else, and
*No effect when* where it depends on other options.

**Looking before running.** `trainer.dry_run=True` checks everything, prints the plan (batch sizes,
placement, memory) and stops. `--cfg job` prints the composed configuration.

**Defaults that follow.** Many options take another option's value unless they are set; the table
says which. Setting the other option changes both.
"""


class Row(NamedTuple):
    """One line of a table."""

    key: str
    kind: str
    default: str
    rule: str
    meaning: str


def rendered_page() -> str:
    page = [INTRODUCTION, contents()]
    for name, root in ROOTS.items():
        page += [f"## {name}\n\n{summary(root)} {COMMANDS[name]}\n", *command_tables(name)]
    page.append("## Shared sections\n\nSections that several places have.\n")
    for cls in sorted(SHARED, key=lambda shared: shared.__name__):
        page.append(f"### {cls.__name__}\n\n{summary(cls)}\n\n{table(rows(cls()))}")
    return "\n".join(page).rstrip("\n") + "\n"


def contents() -> str:
    names = [*ROOTS, "Shared sections"]
    return "\n".join(f"- [{name}](#{anchor(name)})" for name in names) + "\n"


def command_tables(name: str) -> Iterator[str]:
    """The tables of a command, each below the path of its section."""
    for path, section in parts(ROOTS[name](), ""):
        like = path if name == "ppo_megatron_trainer" else LIKE.get((name, path))
        text = full_table(section, path) if like is None else shorter_table(section, path, like)
        if text:
            head = f"### `{path}`\n\n{summary(type(section))}" if path else "### Top level"
            yield f"{head}\n\n{text}"


def full_table(section: BaseConfig, path: str) -> str:
    """Every option of a section, or the link to where they are listed."""
    if shared := shared_class(section):
        return reference(section, shared) + "\n"
    lines = own_rows(section, path)
    return table(lines) if lines else ""


def shorter_table(section: BaseConfig, path: str, like: str) -> str:
    """What differs from the section of `ppo_trainer` at `like`; empty when it is the same one."""
    known = set(own_rows(at(PPOConfig(), like), like))
    lines = [row for row in own_rows(section, path) if row not in known]
    other = f"Like [`{like}`](#{anchor(like)}) of `ppo_trainer`"
    if lines:
        return f"{other}, except:\n\n{table(lines)}"
    return "" if path == like else f"{other}.\n"


def parts(section: BaseConfig, path: str) -> Iterator[tuple[str, BaseConfig]]:
    """The sections that have a table of their own, with their paths."""
    yield path, section
    if path in SPLIT_SECTIONS:
        for item in fields(section):
            value = vars(section)[item.name]
            if isinstance(value, BaseConfig):
                yield from parts(value, f"{path}.{item.name}" if path else item.name)


def at(section: BaseConfig, path: str) -> BaseConfig:
    for name in filter(None, path.split(".")):
        section = section[name]
    return section


def own_rows(section: BaseConfig, path: str) -> list[Row]:
    """The rows of a section's table; a split section leaves its parts to their own tables."""
    every = list(rows(section))
    if path not in SPLIT_SECTIONS:
        return every
    return [row for row in every if "." not in row.key and row.kind != "section"]


def rows(section: BaseConfig, prefix: str = "") -> Iterator[Row]:
    """The options of a section with those of its parts, as keys below `prefix`."""
    cls = type(section)
    hints, documented, tree = type_hints(cls), sentences(cls), default_tree(section)
    for item in filter(is_option, fields(section)):
        key, value = f"{prefix}{item.name}", vars(section)[item.name]
        meaning = f"{documented[item.name]} {state_of(section, item)}".rstrip()
        if not isinstance(value, BaseConfig):
            default = shown_default(value, item)
            yield Row(key, shown_type(hints[item.name]), default, shown_rule(item), meaning)
        elif not isinstance(tree[item.name], Mapping):
            yield Row(key, "section", shown_default(None, item), "", meaning)
        elif shared := shared_class(value):
            yield Row(key, "section", "", "", f"{meaning} {reference(value, shared)}")
        else:
            yield from rows(value, f"{key}.")


def state_of(section: BaseConfig, item: Field[Any]) -> str:
    """When an option has no effect, and which of its values are refused."""
    part = KeyPart(section, item, "")
    absent: Absent | None = part.rule("absent")
    notes = []
    if absent is not None:
        values = ", ".join(f"`{value}`" for value in absent.values or ())
        notes.append(f"**Refused**{f' ({values})' if values else ''}: {absent.reason}.")
    conditions: tuple[When, ...] = part.rule("used_if") or ()
    for condition in conditions:
        always = ": " if condition.is_never else " when "
        notes.append(f"No effect{always}{condition.reason}.")
    return " ".join(notes)


def shared_class(section: BaseConfig) -> type[BaseConfig] | None:
    """The shared table that has all options of a section, if there is one."""
    names = {item.name for item in fields(section)}
    for cls in SHARED:
        if isinstance(section, cls) and names == {item.name for item in fields(cls)}:
            return cls
    return None


def reference(section: BaseConfig, shared: type[BaseConfig]) -> str:
    """A link to the shared table, and what differs here."""
    usual = default_tree(shared())
    different = [
        (name, value)
        for name, value in default_tree(section).items()
        if name != "_target_" and usual[name] != value
    ]
    link = f"See [{shared.__name__}](#{anchor(shared.__name__)})"
    return f"{link}; here {'; '.join(differences(different))}." if different else f"{link}."


def differences(different: list[tuple[str, Any]]) -> Iterator[str]:
    """Fixed values one by one, following ones by the section they follow."""
    followers: dict[str, list[str]] = {}
    for name, value in different:
        if isinstance(value, str) and (keys := followed_keys(value)):
            followers.setdefault(keys[0].rpartition(".")[0], []).append(f"`{name}`")
        else:
            yield f"`{name}` is `{inline(value)}`"
    for section, names in followers.items():
        verb = "follows" if len(names) == 1 else "follow"
        yield f"{', '.join(names)} {verb} `{section}`"


def shown_default(value: Any, item: Field[Any]) -> str:
    written = item.metadata.get("yaml")
    followed = follows(written) if isinstance(written, str) else ""
    value = value if isinstance(written, str | None) else written
    literal = "" if isinstance(value, BaseConfig) or (value is None and followed) else inline(value)
    return ", ".join(part for part in (f"`{literal}`" if literal else "", followed) if part)


def follows(interpolation: str) -> str:
    """In words, where an interpolation takes its value from."""
    names = [f"`{key}`" for key in followed_keys(interpolation)]
    return f"follows {' and '.join(names)}" if names else ""


def followed_keys(interpolation: str) -> list[str]:
    """The keys in an interpolation; one in the same section is named without its path."""
    return re.findall(r"\$\{(?:oc\.select:)?\.*([\w.]+)", interpolation)


def shown_type(hint: Any) -> str:
    words = []
    for member in union_members(hint):
        if member is NoneType:
            words.append("null")
        elif is_dataclass(member):
            words.append("section")
        elif get_origin(member) is list:
            words.append(f"list of {get_args(member)[0].__name__}")
        else:
            words.append((get_origin(member) or member).__name__)
    return " or ".join(words)


def shown_rule(item: Field[Any]) -> str:
    rule = item.metadata
    words = [f"{sign} {rule[name]}" for name, sign in SIGNS.items() if name in rule]
    if "choices" in rule:
        words.append(", ".join(f"`{inline(choice)}`" for choice in rule["choices"]))
    return "; ".join(words)


def table(lines: Iterable[Row]) -> str:
    head = Row("key", "type", "default", "rule", "meaning")
    body = [head, ("---",) * len(head), *(row._replace(key=f"`{row.key}`") for row in lines)]
    return "\n".join("| " + " | ".join(map(escaped, cells)) + " |" for cells in body) + "\n"


def escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def anchor(title: str) -> str:
    """The name that GitHub gives to a heading: lower case, no punctuation, dashes for spaces."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
