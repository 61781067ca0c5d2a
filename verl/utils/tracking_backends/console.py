"""The step in the terminal, for a person; the step in a log file, for `grep`.

On a terminal each step is a table with a row per group of metrics (`actor/...` is one group).
A group appears when one of its values has changed since it was last shown; groups of bookkeeping
appear only when one of their numbers is not finite, and a last line counts what was left out.
Where the output is not a terminal, every metric goes on one line: `step:3 - actor/entropy:0.7`.

Names and values may come from a dataset or a model; they are escaped, never interpreted.
"""

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl.utils.printable import printable
from verl.utils.tracking_backends.base import TrackingBackend, plain

QUIET_GROUPS = {"global_seqlen", "timing_per_token_ms", "val-aux", "variance_proxy"}
FIRST_GROUPS = ["val-core", "critic", "actor", "response_length"]


class ConsoleBackend(TrackingBackend):
    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        config: Any = None,
        *,
        console: Console | None = None,
    ) -> None:
        super().__init__(project_name, experiment_name, config)
        self._console = console if console is not None else Console()
        self._shown: dict[str, dict[str, str]] = {}  # group -> what its row said

    def log(self, data: Mapping[str, Any], step: int) -> None:
        if self._console.is_terminal:
            self._print_table(data, step)
        else:
            self._console.print(Text(step_line(data, step)), soft_wrap=True)

    def _print_table(self, data: Mapping[str, Any], step: int) -> None:
        groups = in_groups(data)
        shown = [group for group in groups if self._is_worth_showing(group, groups[group])]
        table = Table(title=f"step {step}", title_justify="left", show_header=False)
        for group in sorted(shown, key=_place):
            self._shown[group] = {name: number(value) for name, value in groups[group].items()}
            row = "  ".join(f"{name} {value}" for name, value in self._shown[group].items())
            table.add_row(Text(printable(group), style="bold"), Text(row))
        num_hidden = sum(len(groups[group]) for group in groups if group not in shown)
        if num_hidden:
            table.add_row(Text("not shown"), Text(f"{num_hidden} metrics", style="dim"))
        self._console.print(table)

    def _is_worth_showing(self, group: str, values: Mapping[str, Any]) -> bool:
        if group in QUIET_GROUPS:
            return any(isinstance(v, float) and not math.isfinite(v) for v in values.values())
        row = {name: number(value) for name, value in values.items()}
        return self._shown.get(group) != row


def in_groups(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Metrics by what stands before their first slash; names without one share a group."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in data.items():
        group, slash, rest = name.partition("/")
        entry = (group, rest) if slash else ("", name)
        groups.setdefault(entry[0], {})[printable(entry[1])] = plain(value)
    return groups


def step_line(data: Mapping[str, Any], step: int) -> str:
    entries = [f"{printable(name)}:{printable(plain(value))}" for name, value in data.items()]
    return " - ".join([f"step:{step}", *entries])


def number(value: Any) -> str:
    """Four significant digits, whole numbers in full; anything else escaped and short."""
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e9:
            return f"{value:.1f}"
        return f"{value:.4g}"
    return printable(value, max_characters=120)


def _place(group: str) -> tuple[int, str]:
    place = FIRST_GROUPS.index(group) if group in FIRST_GROUPS else len(FIRST_GROUPS)
    return place, group
