"""`python -m verl.profile` tells where the time of a run went, down to operations."""

from tests.toy import ACTOR, make_toy, toy_run
from verl.board.reader import one_run
from verl.board.store import Step, StoreWriter
from verl.profile import chosen_steps, main, operations


def event(name, ts, dur, tid=1):
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


def test_own_time_is_without_that_of_inner_operations():
    """linear calls addmm twice, which calls copy once; another thread is counted apart."""
    events = [
        event("linear", 0, 100),
        event("addmm", 10, 30),
        event("copy", 20, 5),
        event("addmm", 50, 20),
        event("linear", 100, 10),
        event("copy", 0, 7, tid=2),
        {"ph": "i", "name": "[memory]"},
    ]
    found = {one.name: (one.num_calls, one.total, one.own) for one in operations(events)}
    assert found == {"linear": (2, 110, 60), "addmm": (2, 50, 45), "copy": (2, 12, 12)}
    assert [one.name for one in operations(events)] == ["linear", "addmm", "copy"]


def test_a_recorded_and_profiled_run_is_told_as_tables(tmp_path, capsys):
    toy_run(
        make_toy(tmp_path / "toy"),
        tmp_path / "run",
        *("trainer.board=true", "data.val_files=[]"),
        *("global_profiler.tool=torch", "global_profiler.steps=[2]"),
        *(f"global_profiler.save_path={tmp_path / 'profile'}", f"{ACTOR}.profiler.enable=true"),
        f"{ACTOR}.profiler.tool=torch",
        f"{ACTOR}.profiler.save_path={tmp_path / 'profile'}",
    )
    capsys.readouterr()
    assert main([str(tmp_path / "run" / "checkpoints"), "--top", "200"]) == 0
    said = capsys.readouterr().out
    for row in ("update_actor", "gen", "step_step2_rank0", "aten::mm", "100.0%"):
        assert row in said
    assert main([str(tmp_path / "profile"), "--top", "3"]) == 0
    assert "step_step2_rank0" in capsys.readouterr().out
    assert main([str(tmp_path / "run" / "checkpoints"), "--steps", "7:9"]) == 2
    assert "has no step in 7:9" in capsys.readouterr().err
    store = one_run(tmp_path / "run" / "checkpoints")
    for span, steps in (("1", [1]), ("2:", [2]), (":1", [1]), (None, [1, 2])):
        assert [entry["step"] for entry in chosen_steps(store, span)] == steps
    assert main([str(tmp_path / "run" / "checkpoints"), "--steps", "last"]) == 2
    assert "--steps is 'last'; write first:last" in capsys.readouterr().err


def test_a_folder_with_neither_is_named(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "holds no board.sqlite" in capsys.readouterr().err


def test_how_to_record_a_profile_is_said(tmp_path, capsys):
    store = StoreWriter(tmp_path, facts={}, decode=str, max_bytes=1 << 20)
    store.add(Step(number=1, metrics={}, seconds={"gen": 1.0, "other": 3.0}))
    store.close()
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "75.0%" in said
    assert "global_profiler.steps=[2]" in said
