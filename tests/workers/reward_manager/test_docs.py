"""The examples in docs/rewards.md do what they show, and every manager is in its table."""

import doctest
from pathlib import Path

from verl.workers.reward_manager import REWARD_MANAGER_REGISTRY

PAGE = Path(__file__).parents[3] / "docs" / "rewards.md"


def test_the_examples_in_the_documentation_are_true():
    results = doctest.testfile(str(PAGE), module_relative=False)
    assert results.attempted > 15
    assert results.failed == 0


def test_every_built_in_manager_is_in_the_table():
    text = PAGE.read_text()
    built_in = {
        name
        for name in REWARD_MANAGER_REGISTRY
        if REWARD_MANAGER_REGISTRY[name].__module__.startswith("verl.") and name != "limited"
    }
    assert [name for name in sorted(built_in) if f"| `{name}` |" not in text] == []
