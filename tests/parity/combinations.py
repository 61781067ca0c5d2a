"""The ways to split one mini-batch, and a few of them in which any two choices meet."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product

from tests.parity.models import ARCHITECTURES, WITH_EXPERTS
from tests.parity.rows import ROWS

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an engine is built for."""

    num_ranks: int
    ranks_per_sequence: int
    sharding: str
    prefix_sharing: bool
    architecture: str
    role: str
    adapters: bool


@dataclass(frozen=True, kw_only=True)
class Combination:
    """An update by an engine."""

    setup: Setup
    cut: str
    aggregation: str
    rows: str

    @property
    def choices(self) -> dict[str, object]:
        own = {"cut": self.cut, "aggregation": self.aggregation, "rows": self.rows}
        return {**asdict(self.setup), **own}


def every_combination(num_ranks: int) -> list[Combination]:
    is_alone = num_ranks == 1
    setups = product(
        [1] if is_alone else [1, 2],
        ["none"] if is_alone else ["zero1", "full", "experts"],
        [False, True],
        ARCHITECTURES,
        ["actor", "critic"],
        [False, True],
    )
    updates = list(product(["rows", "tokens"], AGGREGATIONS, ROWS))
    return [
        Combination(
            setup=Setup(
                num_ranks=num_ranks,
                ranks_per_sequence=ranks_per_sequence,
                sharding=sharding,
                prefix_sharing=prefix_sharing,
                architecture=architecture,
                role=role,
                adapters=adapters,
            ),
            cut=cut,
            aggregation=aggregation,
            rows=rows,
        )
        for ranks_per_sequence, sharding, prefix_sharing, architecture, role, adapters in setups
        for cut, aggregation, rows in updates
        if sharding != "experts" or architecture in WITH_EXPERTS
    ]


def pairs_of(combination: Combination) -> set[tuple[object, object]]:
    return set(combinations(combination.choices.items(), 2))


def covering(candidates: Sequence[Combination]) -> list[Combination]:
    """Few of them, in which every pair of choices occurs that occurs in any."""
    pairs = {candidate: pairs_of(candidate) for candidate in candidates}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        chosen.append(max(candidates, key=lambda candidate: len(pairs[candidate] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen
