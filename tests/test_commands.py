"""The short names of commands, and the doctor."""

import io
import sys
from importlib import import_module

import pytest
from rich.console import Console

from verl import doctor
from verl.cli import COMMANDS, main


def test_each_short_name_is_a_module_that_can_be_run():
    for module, _ in COMMANDS.values():
        assert "main" in vars(import_module(module))


def test_a_misspelt_command_is_refused_with_the_one_that_was_meant(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verl", "trian"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "did you mean train?" in capsys.readouterr().err


def test_without_a_command_all_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verl"])
    main()
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in COMMANDS)


def test_a_command_gets_its_arguments(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["verl", "board", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "holds no board.sqlite" in capsys.readouterr().err


def test_the_doctor_finds_this_machine_fit_to_train():
    output = io.StringIO()
    assert doctor.main(Console(file=output, width=200)) == 0
    assert "torch" in output.getvalue()


def test_the_doctor_names_what_is_missing_and_the_way_out(monkeypatch):
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda name: ["torch>=99", "nonesuch", "x; extra == 'a'"]
    )
    old, gone = doctor.check_requirements()
    assert (old.state, old.remedy) == ("missing", 'pip install "torch>=99"')
    assert (gone.found, gone.remedy) == ("not installed", 'pip install "nonesuch"')
    (folder,) = doctor.check_folder("cache", doctor.Path("/proc/nowhere"))
    assert (folder.state, folder.remedy) == ("missing", "choose a folder that is yours")
