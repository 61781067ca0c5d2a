"""From the keys that older scripts use to the keys of today.

`legacy_rules.RULES` is the table; this file applies it. A rule applies to its key and to everything
below it, and only where the root has no option of that name itself (`rollout.n` is an old
spelling for the PPO trainer and a real key of the generation command). Each old key that a user
sets gives exactly one notice. If the key of today is set too, to another value, that is a fault,
because we cannot know which one is meant.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from verl.config.faults import Fault, shown
from verl.config.keys import Keys
from verl.config.legacy_rules import RULES, Rule
from verl.config.variants import Values, Variant


@dataclass
class Modernised:
    """The user's values under today's keys, a notice per old key, and the conflicts met."""

    values: Values
    notices: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def settle(self, old: str, value: Any, new: str, meant: Any, *, completes: bool) -> None:
        path = tuple(new.split("."))
        is_set = path in self.values and not completes
        if is_set and self.values[path] != meant:
            text = (
                f"{old} is {shown(value)}, which means {new}={short(meant)}, but {new} is set too, "
                f"to {short(self.values[path])}; remove one of the two"
            )
            self.faults.append(Fault(text, (old, new)))
        self.values[path] = meant


@dataclass(frozen=True)
class Meaning:
    """What an old key with its value comes to today: keys with values, and the reason."""

    values: dict[str, Any]
    why: str
    completes: bool


def modernise(
    values: Values, variant: Variant, every_key: Keys, *, decided: Collection[str] = ()
) -> Modernised:
    """Translate every old key; values under today's keys stay as they are.

    `every_key` are the keys of the variant and of its siblings. A key in `decided` stands on the
    command line and wins over an old spelling in a file, as it does over today's.
    """
    settings = variant.defaults | values
    meanings = {
        path: meaning_of(".".join(path), value, settings, (variant.keys, every_key))
        for path, value in values.items()
    }
    result = Modernised({path: values[path] for path in values if meanings[path] is None})
    for path, meaning in meanings.items():
        if meaning is not None:
            old, value = ".".join(path), values[path]
            result.notices.append(notice(old, value, meaning))
            for new, meant in meaning.values.items():
                if old in decided or new not in decided:
                    result.settle(old, value, new, meant, completes=meaning.completes)
    return result


def meaning_of(
    path: str, value: Any, settings: Values, scopes: tuple[Keys, Keys]
) -> Meaning | None:
    """Follow the rules until only keys of today are left; None when `path` is one already.

    A rule that leads to a key of this variant is preferred to one that leads to a sibling's.
    """
    for scope in scopes:
        for rule in RULES:
            translated = translate(rule, path, value, settings, scopes[0])
            if translated is None:
                continue
            meant, why = {}, rule.why
            for new, one in translated.items():
                further = meaning_of(new, one, settings, scopes) if new != path else None
                meant.update(further.values if further else {new: one})
                why = further.why or why if further else why
            if all(new in scope for new in meant):
                return Meaning(meant, why, rule.completes)
    return None


def translate(
    rule: Rule, path: str, value: Any, settings: Values, keys: Keys
) -> dict[str, Any] | None:
    """One step of one rule; None when the rule is not about this key and value."""
    way = rule.way_to(path)
    is_known = path in keys
    if way is None or (is_known and (value is None or not rule.is_about_value)):
        return None
    if rule.new is None:
        return {}
    if callable(rule.new):
        return rule.new(way, value, settings)
    return {rule.target(way, path): value}


def renamed(path: str, keys: Keys) -> str | None:
    """Today's key for an old one that is merely a rename; None when there is more to it."""
    if path in keys:
        return None
    for rule in RULES:
        way = rule.way_to(path)
        if way is not None:
            if not isinstance(rule.new, str):
                return None
            new = rule.target(way, path)
            return new if new in keys else renamed(new, keys)
    return None


def is_old(path: str, keys: Keys) -> bool:
    """Whether some rule knows this key, so that it may be written on a command line."""
    return path not in keys and any(rule.way_to(path) is not None for rule in RULES)


def notice(old: str, value: Any, meaning: Meaning) -> str:
    reason = f" ({meaning.why})" if meaning.why else ""
    if not meaning.values:
        return f"{old} has no effect{reason}"
    today = [key if one == value else f"{key}={short(one)}" for key, one in meaning.values.items()]
    return f"{old} is now {' and '.join(today)}{reason}"


def short(value: Any, limit: int = 60) -> str:
    text = shown(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
