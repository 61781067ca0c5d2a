"""The examples in docs/data.md do what they show."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "data.md"


def test_the_examples_in_the_documentation_are_true():
    results = doctest.testfile(str(PAGE), module_relative=False)
    assert results.attempted > 30
    assert results.failed == 0
