"""A mini-batch has one gradient and one report, however it is split and on how many ranks.

Every number is compared with one padded pass of the plain Hugging Face model (`reference.py`).
"""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.parity import models
from tests.parity.combinations import Combination, covering, every_combination
from tests.parity.reference import Expected, expected
from tests.parity.rows import batch
from tests.parity.table import table
from tests.parity.updates import Deviation, largest, make_updates
from tests.utils.two_ranks import run_on_ranks

LARGEST = 1e-5
NUMBERS_OF_RANKS = [1, 2, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    models.save_models(path)
    return path


class Expectations:
    """The reference of each case, computed once for all splits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[object, ...], Expected] = {}

    def of(self, case: Combination) -> Expected:
        setup = case.setup
        key = (setup.architecture, setup.role, setup.adapters, case.aggregation, case.rows)
        if key not in self._known:
            kind = (
                AutoModelForTokenClassification if setup.role == "critic" else AutoModelForCausalLM
            )
            path = self.folder / setup.architecture / setup.role
            start = models.load(self.folder, setup.architecture, setup.role, setup.adapters)
            self._known[key] = expected(
                kind.from_pretrained(path, attn_implementation="eager").eval(),
                {name: p for name, p in start.named_parameters() if p.requires_grad},
                batch(case.rows),
                role=setup.role,
                aggregation=case.aggregation,
                adapter_scale=models.LORA.alpha / models.LORA.rank,
            )
        return self._known[key]


@pytest.fixture(scope="module")
def expectations(folder: Path) -> Expectations:
    return Expectations(folder)


def measured(
    cases: Sequence[Combination], expectations: Expectations, ranks_folder: Path, seconds: float
) -> list[Deviation]:
    """The deviation of each case; on several ranks, the largest of any."""
    wanted = [expectations.of(case) for case in cases]
    num_ranks = cases[0].setup.num_ranks
    if num_ranks == 1:
        return make_updates(cases, wanted, expectations.folder)

    def work(rank: int) -> list[Deviation]:
        return make_updates(cases, wanted, expectations.folder, rank)

    answers = run_on_ranks(num_ranks, work, ranks_folder, seconds)
    return [largest(found) for found in zip(*answers, strict=True)]


def assert_small(cases: Sequence[Combination], found: Sequence[Deviation]) -> None:
    wrong = [
        f"{case.choices}: gradient {d.gradient:.1e}, metrics {d.metrics:.1e} ({d.where})"
        for case, d in zip(cases, found, strict=True)
        if not (d.gradient <= LARGEST and d.metrics <= LARGEST)
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)} deviate:\n" + "\n".join(wrong)


@pytest.mark.parametrize("num_ranks", NUMBERS_OF_RANKS)
def test_any_two_ways_to_split_give_the_gradient_and_metrics_of_the_padded_batch(
    num_ranks: int, expectations: Expectations, tmp_path: Path
):
    cases = covering(every_combination(num_ranks))
    assert_small(cases, measured(cases, expectations, tmp_path, seconds=100))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", NUMBERS_OF_RANKS)
def test_every_way_to_split_gives_the_gradient_and_metrics_of_the_padded_batch(
    num_ranks: int,
    expectations: Expectations,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    cases = every_combination(num_ranks)
    found = measured(cases, expectations, tmp_path, seconds=1700)
    with capsys.disabled():
        print("\n".join(["", *table(cases, found)]))
    assert_small(cases, found)


def test_the_few_combinations_have_every_pair_of_choices():
    every = every_combination(2)
    few = covering(every)
    assert len(few) < 20 < len(every)
    pairs = [
        {pair for case in cases for pair in combinations(case.choices.items(), 2)}
        for cases in (few, every)
    ]
    assert pairs[0] == pairs[1]
