"""What is wrong with a configuration, collected so that a user sees all of it at once.

A fault is one sentence: the key, its value, the rule, the way out. Most faults are about the
configuration itself; some are about this machine (a file that is not here, a package that is not
installed). A dry run plans for another machine, so it shows the second kind without refusing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from verl.utils.environment import Misuse


@dataclass(frozen=True)
class Fault:
    """`keys` are the options that the sentence is about, the first one being at fault."""

    text: str
    keys: tuple[str, ...] = ()
    is_about_machine: bool = False


class ConfigError(Misuse, ValueError):
    """A configuration that is refused; the message lists every fault."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = list(faults)
        super().__init__(numbered(self.faults))

    def __reduce__(self) -> tuple[type, tuple[list[Fault]]]:
        return type(self), (self.faults,)  # as it travels from a Ray actor


def numbered(faults: list[Fault]) -> str:
    if len(faults) == 1:
        return faults[0].text
    lines = [f"{number}. {fault.text}" for number, fault in enumerate(faults, start=1)]
    return "\n".join([f"{len(faults)} faults in the configuration:", *lines])


def shown(value: Any) -> str:
    """A value as a message shows it: strings in double quotes, so that an empty one is visible."""
    return f'"{value}"' if isinstance(value, str) else str(value)


def nearest_divisors(number: int, of: int) -> str:
    """The divisors of `of` on both sides of `number`, as "64" or "64 and 128"."""
    divisors = [candidate for candidate in range(1, of + 1) if of % candidate == 0]
    below = [divisor for divisor in divisors if divisor < number][-1:]
    above = [divisor for divisor in divisors if divisor > number][:1]
    return " and ".join(map(str, below + above))


def nearest_multiples(number: int, of: int) -> str:
    """The positive multiples of `of` on both sides of `number`."""
    below = number // of * of
    return " and ".join(str(multiple) for multiple in (below, below + of) if multiple > 0)


def nearest_path(path: Path) -> str:
    """A hint that names what does exist near a path that does not."""
    parent = path.parent
    while not parent.is_dir():
        path, parent = parent, parent.parent
    siblings = sorted(entry.name for entry in parent.iterdir())
    close = get_close_matches(path.name, siblings, n=1)
    if close:
        return f"the closest existing path is {parent / close[0]}"
    return f"the closest existing folder is {parent}"
