import pytest

from tests.chaos import table
from tests.toy import make_toy


@pytest.fixture
def own_toy(tmp_path):
    """A toy task beside which strikes are planned."""
    folder = tmp_path / "toy"
    folder.mkdir()
    return make_toy(folder)


def pytest_terminal_summary(terminalreporter):
    if table.shown:
        terminalreporter.section("faults")
        terminalreporter.write_line(table.as_text(table.shown))
