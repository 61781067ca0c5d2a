"""The examples in docs/graders.md do what they show."""

import doctest
from pathlib import Path

from verl.utils.reward_score import scorers

PAGE = Path(__file__).parents[3] / "docs" / "graders.md"


def test_the_examples_in_the_documentation_are_true():
    results = doctest.testfile(str(PAGE), module_relative=False)
    assert results.attempted > 8
    assert results.failed == 0


def test_every_built_in_data_source_is_in_the_table():
    table = PAGE.read_text()
    patterns = ("numina_", "searchR1_", "my/parity")
    missing = [name for name in scorers if f"`{name}`" not in table]
    assert [name for name in missing if not name.startswith(patterns)] == []
