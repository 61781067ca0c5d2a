"""The largest deviations of many updates as a table."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.parity.combinations import Combination
from tests.parity.updates import Deviation, largest

COLUMNS = {
    "policy": ("actor", False),
    "policy, LoRA": ("actor", True),
    "critic": ("critic", False),
    "critic, LoRA": ("critic", True),
}
HEADER = ("ranks", "per sequence", "sharding", "prompts shared", "cut by", *COLUMNS)


def table(cases: Sequence[Combination], found: Sequence[Deviation]) -> Iterator[str]:
    """Each cell: the largest of its gradients / of its metrics, over what is not in the table."""
    cells: dict[tuple[object, ...], dict[object, list[Deviation]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for case, deviation in zip(cases, found, strict=True):
        setup = case.setup
        split = (
            setup.num_ranks,
            setup.ranks_per_sequence,
            setup.sharding,
            "yes" if setup.prefix_sharing else "no",
            case.cut,
        )
        cells[split][setup.role, setup.adapters].append(deviation)
    yield "| " + " | ".join(HEADER) + " |"
    yield "|---" * len(HEADER) + "|"
    for split, columns in cells.items():
        worst = [largest(columns[key]) for key in COLUMNS.values()]
        numbers = [f"{short(each.gradient)} / {short(each.metrics)}" for each in worst]
        yield "| " + " | ".join(map(str, [*split, *numbers])) + " |"


def short(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")
