"""What becomes of the settings of another program.

A table has a `Row` per setting. A row names the option here, or says why there is none; where
numbers have to be computed from several settings (batch sizes), the program's module does that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
Values = dict[str, Any]


@dataclass(frozen=True)
class Expression:
    """A value that the file computes; only its text is known."""

    text: str

    def __str__(self) -> str:
        return f"<{self.text}>"


class Row(NamedTuple):
    """One setting: the option that it becomes, how, and what is different then.

    Without a target, `note` says why there is none. `convert` gives the options with their values.
    """

    target: str = ""
    note: str = ""
    convert: Callable[[Any], Values] | None = None


Table = Mapping[str, Row]


@dataclass
class Migration:
    """The run in our terms. `module` is the command; `values` are its options."""

    origin: str
    module: str = "verl.trainer.main_ppo"
    flags: list[str] = field(default_factory=list)
    values: Values = field(default_factory=dict)
    maps: list[tuple[str, str]] = field(default_factory=list)
    changes: list[tuple[str, str]] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)

    def set(self, name: str, values: Values, note: str = "") -> None:
        """The setting `name` becomes these options; a note says that it means something else."""
        self.values |= values
        shown = " ".join(f"{key}={written(value)}" for key, value in values.items())
        if note:
            self.changes.append((name, f"{shown}: {note}" if shown else note))
        else:
            self.maps.append((name, shown))

    def take(self, settings: Mapping[str, Any], table: Table) -> None:
        """Translate each setting by its row."""
        for name, value in settings.items():
            row = table.get(name)
            if row is None:
                self.missing.append((name, "not known here"))
            elif not row.target and row.convert is None:
                self.missing.append((name, row.note))
            elif isinstance(value, Expression) and row.target:
                self.set(name, {row.target: value}, f"fill in the value of {value.text}")
            elif isinstance(value, Expression):
                self.missing.append((name, f"its value, {value.text}, is computed"))
            elif row.convert is not None:
                self._convert(name, value, row)
            else:
                self.set(name, {row.target: value}, row.note)

    def _convert(self, name: str, value: Any, row: Row) -> None:
        assert row.convert is not None
        try:
            values = row.convert(value)
        except (ValueError, TypeError, KeyError):
            self.missing.append((name, f"{value!r} has no equivalent; {row.note}".rstrip("; ")))
            return
        self.set(name, values, row.note)


def written(value: Any) -> str:
    """A value as Hydra's command line has it."""
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return "[" + ",".join(written(one) for one in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{written(one)}" for key, one in value.items()) + "}"
    return str(value)


def number(value: Any) -> int:
    """An int from a flag's text; 8.0 and "8" count as well."""
    as_float = float(value)
    if not as_float.is_integer():
        raise ValueError(value)
    return int(as_float)
