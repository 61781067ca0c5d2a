"""What each of the user's settings comes to: an effect, none here, or a refusal.

The rules are metadata of the fields (`option(..., used_if=..., absent=..., reads=...)`); this file
applies them to a loaded configuration, before a model is loaded. A setting without effect is named
with the reason. A setting that asks for something that does not exist is refused. Only values that
differ from the default are looked at: scripts may state a default without hearing of it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass
from typing import Any

from verl.config.base import Absent, BaseConfig, When
from verl.config.faults import Fault, shown
from verl.config.schema import Keys, family

OTHER_BACK_END = "it belongs to another training back-end than this run's strategy"


@dataclass(frozen=True)
class KeyPart:
    """One part of a dotted key: its section, its field, and the rest of the key."""

    section: BaseConfig
    item: Field[Any]
    rest: str

    def rule(self, name: str) -> Any:
        """The field's metadata; a field that a subclass states anew inherits its rules."""
        for cls in type(self.section).__mro__:
            item = vars(cls).get("__dataclass_fields__", {}).get(self.item.name)
            if item is not None and name in item.metadata:
                return item.metadata[name]
        return None


def key_parts(config: BaseConfig, key: str) -> list[KeyPart]:
    """The fields from the root to `key`; shorter where undeclared keys or a plain dict begin."""
    parts: list[KeyPart] = []
    section: Any = config
    names = key.split(".")
    for depth, name in enumerate(names):
        declared = section.__dataclass_fields__ if isinstance(section, BaseConfig) else {}
        if name not in declared:
            break
        parts.append(KeyPart(section, declared[name], ".".join(names[depth + 1 :])))
        section = vars(section)[name]
    return parts


def why_idle(config: BaseConfig, key: str) -> str | None:
    """The reason why a key has no effect in this configuration; None when it has one."""
    parts = key_parts(config, key)
    for part in parts:
        if reason := why_unread(part, config):
            return reason
        ignored: Mapping[str, str] = part.rule("ignores") or {}
        if part.rest in ignored:
            return ignored[part.rest]
        is_switch = part.rest in ("enable", "enabled")  # what makes its section idle
        conditions: tuple[When, ...] = part.rule("used_if") or ()
        for condition in conditions:
            is_about_key = condition.is_never or not is_switch
            if is_about_key and not condition.holds(part.section, config):
                return condition.reason
    if parts and parts[-1].item.name == "engine_kwargs":
        return why_engine_ignores(parts[-1])
    return None


def why_unread(part: KeyPart, config: BaseConfig) -> str | None:
    """Why a key of a shared section is not read where this field mounts it; None if it is."""
    if (rule := part.rule("reads")) is None:
        return None
    names, reason, reads_all_if = rule
    if reads_all_if is not None and reads_all_if.holds(part.section, config):
        return None
    return None if any(is_at_or_below(part.rest, name) for name in names) else reason


def why_engine_ignores(part: KeyPart) -> str | None:
    """`engine_kwargs` has a part for each engine, and only that of the engine that runs is read."""
    engine, name = part.rest.partition(".")[0], part.section.get("name")
    is_other = engine and name is not None and engine != name
    return f"name is {name}, and this is for {engine}" if is_other else None


def without_effect(config: BaseConfig, user_set: Iterable[str]) -> list[tuple[str, str]]:
    """The user's settings that cannot matter in this run, each with the reason."""
    keys, every_key = Keys(config), family(type(config)).keys
    idle = []
    for key in sorted(changed(config, user_set)):
        is_of_variant = key in every_key and key not in keys
        reason = OTHER_BACK_END if is_of_variant else why_idle(config, key)
        if reason is not None:
            idle.append((key, reason))
    return idle


def idle_notices(config: BaseConfig, user_set: Iterable[str]) -> list[str]:
    """A line for each setting without effect, for the start of a run."""
    idle = without_effect(config, user_set)
    return [f"{key} has no effect here: {reason}" for key, reason in idle]


def absent_faults(
    config: BaseConfig, user_set: Iterable[str], *, has_own_code: bool = False
) -> Iterator[Fault]:
    """A refusal for each setting that asks for something that does not exist here.

    `has_own_code` says that the caller's program may implement what `Absent.unless` leaves to it.
    """
    for key in sorted(user_set):
        for part in key_parts(config, key):
            rule: Absent | None = part.rule("absent")
            if rule is None:
                continue
            if rule.unless is not None and (has_own_code or rule.unless(part.section, config)):
                continue
            value = vars(part.section)[part.item.name]
            if rule.covers(value, default_of(part.item)):
                yield Fault(f"{key} is {shown(value_at(config, key))}; {rule.reason}", (key,))


def changed(config: BaseConfig, user_set: Iterable[str]) -> Iterator[str]:
    """The keys whose value is not the default of their field."""
    for key in user_set:
        parts = key_parts(config, key)
        if (
            not parts
            or parts[-1].rest
            or vars(parts[-1].section)[parts[-1].item.name] != default_of(parts[-1].item)
        ):  # undeclared, or below a plain dict
            yield key


def default_of(item: Field[Any]) -> Any:
    if item.default is not MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not MISSING else None


def value_at(config: Any, key: str) -> Any:
    """The value of a key; "" where a dict or a section has no such key."""
    for name in key.split("."):
        config = config.get(name, "")
        if not isinstance(config, dict | BaseConfig):
            break
    return config


def is_at_or_below(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(f"{ancestor}.")
