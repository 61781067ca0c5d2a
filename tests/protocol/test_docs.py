"""The examples in docs/batch.md do what they show."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "batch.md"


def test_the_examples_in_the_documentation_are_true():
    results = doctest.testfile(str(PAGE), module_relative=False)
    assert results.attempted > 20
    assert results.failed == 0
