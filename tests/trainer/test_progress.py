import io
import os
import signal
import threading

import pytest
from rich.console import Console

from verl.trainer.common import RunProgress, RunSummary, Termination, shares_of_time


def shown(*, is_terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=100)
    with RunProgress(4, console=console) as progress:
        progress.show(1)
        progress._bar.refresh()
    return output.getvalue()


def test_a_terminal_shows_how_far_the_run_is_and_how_long_it_takes():
    text = shown(is_terminal=True)
    assert "1/4" in text
    assert "left:" in text


def test_anything_else_shows_nothing():
    assert shown(is_terminal=False) == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_request_to_stop_is_noted_and_the_second_one_obeyed_at_once(number, capfd):
    before = signal.getsignal(number)
    with Termination() as termination:
        assert not termination.is_requested
        os.kill(os.getpid(), number)
        assert termination.is_requested
        with pytest.raises(SystemExit) as end:
            os.kill(os.getpid(), number)
        assert end.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert capfd.readouterr().err.count("finishing the step, saving, then ending") == 1


def test_what_torchrun_passes_on_is_no_second_request(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with Termination() as termination:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert termination.is_requested


def test_other_threads_may_train_without_listening():
    seen = []

    def run():
        with Termination() as termination:
            seen.append(termination.is_requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert seen == [False]


def test_the_seconds_of_a_step_add_up_to_its_wall_time():
    seconds = shares_of_time({"gen": 2.0, "update_actor": 1.0, "step": 3.2}, 4.0)
    assert seconds == {"gen": 2.0, "update_actor": 1.0, "other": 1.0}
    nested = shares_of_time({"gen": 3.0, "reward": 1.0}, 3.5)  # grading inside generation
    assert nested == {"gen": 2.5, "reward": 1.0, "other": 0.0}


def test_the_summary_tells_first_last_and_best_and_where_time_went():
    summary = RunSummary()
    summary.add(0, {"val-core/x/acc/mean@1": 0.1}, {"other": 1.0})
    for step, accuracy in ((1, 0.7), (2, 0.5)):
        metrics = {"val-core/x/acc/mean@1": accuracy, "actor/lr": 1.0, "tripwire/dull": step - 1}
        summary.add(step, metrics, {"gen": 2.0, "other": 0.5})
    first, accuracy, time, dull = summary.lines()
    assert first.startswith("steps 1 to 2 in 0:00")
    assert accuracy == "val-core/x/acc/mean@1: 0.1 -> 0.5, best 0.7 at step 1"
    assert time == "time: gen 67%, other 33%"
    assert dull == "tripwire/dull: 1 steps"
    assert RunSummary().lines() == []
