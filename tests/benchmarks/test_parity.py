"""The kit names the programs that it cannot run, and draws those that it has run."""

import sys
from argparse import Namespace

from benchmarks.parity import missing_packages, plot, programs_that_run


def test_a_program_that_is_not_installed_is_named_and_left_out(capsys):
    nowhere = Namespace(trl=sys.executable, openrlhf=sys.executable)
    assert missing_packages(sys.executable, "no_such_package", "json") == (
        f"not installed in the environment of {sys.executable}: no_such_package"
    )
    assert missing_packages(sys.executable, "json", "torch") == ""
    assert "openrlhf" not in programs_that_run(nowhere)
    assert "openrlhf is left out: not installed in the environment" in capsys.readouterr().out


def test_curves_are_drawn_over_each_other(tmp_path):
    curves = {
        name: {"rewards": [[0.1, 0.5], [0.2, 0.6]], "seconds": [1.0, 1.0]}
        for name in ("verl", "trl")
    }
    plot(curves, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
