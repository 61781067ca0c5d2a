"""A run whose tools never say the same twice is resumed, and replayed, bit for bit."""

import json
import shutil
import signal

import pytest

from tests.e2e.test_resume import without_durations
from tests.e2e.victim import run_child
from tests.toy import ROLLOUT
from verl.agent_loop.journal_files import read_step, step_file
from verl.trainer.main_replay import main as replay

STEPS = 4
CHANGES = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=2",
    f"{ROLLOUT}.exact=true",  # a reply that comes sooner changes who is computed with whom
)


def run(toy, output, die_at=""):
    """A run with the asking loop; its exit code."""
    output.mkdir(exist_ok=True)
    loops = output / "loops.yaml"
    entry = {"name": "asking", "_target_": "tests.e2e.asking.AskingLoop"}
    files = {"asked": str(output / "asked"), "die_at": str(output / "die_at")}
    loops.write_text(json.dumps([entry | files]))
    (output / "die_at").write_text(die_at)
    return run_child(
        toy,
        output,
        *CHANGES,
        f"{ROLLOUT}.agent.agent_loop_config_path={loops}",
        f"{ROLLOUT}.agent.default_agent_loop=asking",
    )


def asked(output):
    path = output / "asked"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def metrics(output):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: without_durations(line["data"]) for line in lines}


def weights(output):
    folder = output / "checkpoints" / f"global_step_{STEPS}" / "actor"
    return {p.name: p.read_bytes() for p in folder.rglob("*.safetensors")}


@pytest.fixture(scope="module")
def killed(toy, tmp_path_factory):
    """A run killed inside a tool call of step 4, two steps after its checkpoint, and resumed."""
    output = tmp_path_factory.mktemp("killed")
    assert run(toy, output, die_at="4-1") == -signal.SIGKILL
    before = metrics(output), asked(output), step_file(output / "checkpoints/journal", 4)
    recorded = read_step(before[2])
    assert 0 < len(recorded.trajectories) < 16
    shutil.copy(before[2], output / "cut.jsonl")
    assert run(toy, output) == 0
    return output, *before[:2], recorded


def test_what_was_journalled_is_not_asked_again(killed):
    output, metrics_before, asked_before, recorded = killed
    again = asked(output)[len(asked_before) :]
    assert {uid.split("-")[0] for uid, *_ in again} == {"4"}  # step 3 was complete
    after = metrics(output)
    assert after[3] == metrics_before[3]
    now = read_step(step_file(output / "checkpoints/journal", 4))
    for place, trajectory in recorded.trajectories.items():
        assert now.trajectories[place] == trajectory
    live = [t for place, t in now.trajectories.items() if place not in recorded.trajectories]
    assert len(again) == sum(len(one.replies) for one in live) > 0


@pytest.mark.slow
def test_a_run_from_scratch_with_the_journal_of_a_killed_one_becomes_that_run(
    toy, tmp_path, killed
):
    shutil.copytree(killed[0] / "checkpoints/journal", tmp_path / "checkpoints/journal")
    assert run(toy, tmp_path) == 0
    assert asked(tmp_path) == []
    assert weights(tmp_path) == weights(killed[0])
    after = metrics(killed[0])
    assert {step: found for step, found in metrics(tmp_path).items() if step in after} == after
    other = tmp_path / "other"
    assert run(toy, other) == 0
    assert weights(other) != weights(tmp_path)  # so the replies matter


def test_a_step_is_replayed_bit_for_bit_without_the_world(toy, killed, capsys):
    output = killed[0]
    (output / "asked").unlink()
    for step in (1, 4):  # 4 follows from the checkpoint of step 2 and a step made again
        place = ["--step", str(step), "--uid", f"{step}-3"]
        assert replay([str(output / "checkpoints"), *place]) == 0
        said = capsys.readouterr().out
        assert "16 of 16 trajectories are bit-identical" in said
        assert f"prompt {step}-3, sample 3" in said
    assert asked(output) == []


def test_a_live_replay_names_the_first_reply_that_differs(toy, killed, capsys):
    output = killed[0]
    assert replay([str(output / "checkpoints"), "--step", "3", "--live"]) == 1
    said = capsys.readouterr().out
    assert "first difference: step 3, train, prompt 3-" in said
    assert '"digit"' in said
    assert {uid.split("-")[0] for uid, *_ in asked(output)} == {"3"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--step", "9"], "no step 9"), (["--step", "0"], "steps count from 1")],
)
def test_what_cannot_be_replayed_is_refused(killed, capsys, arguments, message):
    assert replay([str(killed[0] / "checkpoints"), *arguments]) == 2
    assert message in capsys.readouterr().err
