"""All keys that a root section has, and the one a user probably meant.

A key is the dotted path of a field. Below a field that is a plain dict (engine arguments, model
overrides) every key is allowed, because its meaning belongs to somebody else.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from verl.config.base import BaseConfig, is_option


class Keys:
    """The keys of one or several roots (the FSDP and the Megatron variant of a command)."""

    def __init__(self, *roots: Any) -> None:
        self.leaves: set[str] = set()
        self.sections: set[str] = set()
        self.nullable: set[str] = set()
        self.free: set[str] = set()
        for root in roots:
            self._walk(root)

    def _walk(self, section: Any, prefix: str = "") -> None:
        hints = type_hints(type(section))
        for item in filter(is_option, fields(section)):
            path = prefix + item.name
            classes = section_classes(hints[item.name])
            value = vars(section)[item.name]
            nested = [value] if is_dataclass(value) else []
            nested += [cls() for cls in classes if not isinstance(value, cls)]
            if type(None) in union_members(hints[item.name]):
                self.nullable.add(path)
            for child in nested:
                self.sections.add(path)
                self._walk(child, f"{path}.")
            if not classes:
                (self.free if accepts_mapping(hints[item.name]) else self.leaves).add(path)

    def __contains__(self, path: str) -> bool:
        """Whether `path` is an option, a section, or lies in a free dict."""
        return self.is_declared(path) or any(path.startswith(f"{free}.") for free in self.free)

    def is_declared(self, path: str) -> bool:
        return path in self.leaves or path in self.sections or path in self.free

    def closest(self, path: str) -> list[str]:
        """The keys that `path` may stand for, the best first; empty when nothing is similar."""
        scores = {key: similarity(path, key) for key in sorted(self.leaves | self.free)}
        best = max(scores.values(), default=0.0)
        if best < 1.2:
            return []
        close = [key for key in scores if scores[key] > best - 0.1]
        return sorted(close, key=lambda key: -scores[key])[:3]


@cache
def type_hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def union_members(hint: Any) -> tuple[Any, ...]:
    """The alternatives that a type hint allows: itself when it is no union."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def section_classes(hint: Any) -> list[type]:
    """The dataclasses that a field's type names; empty for a plain option."""
    return [cls for cls in union_members(hint) if is_dataclass(cls) and isinstance(cls, type)]


def accepts_mapping(hint: Any) -> bool:
    """Whether a plain dict is a value of this type."""
    return any(
        member is Any or (get_origin(member) or member) is dict for member in union_members(hint)
    )


def similarity(query: str, key: str) -> float:
    """From 0 to 3: likeness of the last segment, of the whole path, and of the way to it.

    The third part is the share of the query's leading segments that the key has too, so that
    `actor.lr` finds `actor_rollout_ref.actor.optim.lr` and not `critic.optim.lr`.
    """
    *query_way, query_name = query.split(".")
    *key_way, key_name = key.split(".")
    name = SequenceMatcher(None, query_name, key_name).ratio()
    if len(query_name) > 2 and query_name in key_name:
        name = max(name, 0.8)
    if name < 0.6:
        return 0.0
    kept = sum(any(is_alike(step, part) for part in key_way) for step in query_way)
    way = kept / len(query_way) if query_way else 0.5
    return name + SequenceMatcher(None, query, key).ratio() + way


def is_alike(step: str, part: str) -> bool:
    return step == part or SequenceMatcher(None, step, part).ratio() > 0.8


def walk_leaves(section: BaseConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each option of a loaded configuration with its value, extras included, unlogged."""
    state = vars(section)
    declared = [(item.name, state[item.name]) for item in fields(section)]
    for name, value in [*declared, *state["extras"].items()]:
        if isinstance(value, BaseConfig):
            yield from walk_leaves(value, f"{prefix}{name}.")
        elif name != "_target_":
            yield prefix + name, value
