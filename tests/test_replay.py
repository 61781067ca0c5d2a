"""A recorded step is made again bit for bit, and another algorithm answers for the same batch."""

import shutil
import sqlite3

import pytest
import torch

from tests.toy import make_toy, toy_run
from verl.board.reader import StoreReader
from verl.board.store import FILE_NAME
from verl.replay import cosine, main, overrides_of, remake, request_of


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three recorded steps with a checkpoint after the first; the folder and what was reported."""
    folder = tmp_path_factory.mktemp("replay")
    lines, trainer = toy_run(
        make_toy(folder / "toy"),
        folder / "run",
        *("trainer.board=true", "trainer.total_training_steps=3", "trainer.save_freq=2"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=2", "algorithm.use_kl_in_reward=true"),
        "data.val_files=[]",
    )
    return folder / "run" / "checkpoints", lines, trainer.batch


def test_a_step_is_made_again_bit_for_bit(run, tmp_path):
    folder, lines, batch = run
    before = (folder / FILE_NAME).read_bytes()
    remade, start = remake(request_of(folder, 3), tmp_path)
    assert start == folder / "global_step_2"
    for name in ("advantages", "old_log_probs", "token_level_rewards", "responses"):
        assert torch.equal(remade.batch.batch[name], batch.batch[name]), name
    assert remade.metrics["actor/grad_norm"] == lines[2]["actor/grad_norm"]
    assert remade.metrics["actor/pg_loss"] == lines[2]["actor/pg_loss"]
    assert (folder / FILE_NAME).read_bytes() == before


def test_steps_between_the_checkpoint_and_it_are_trained_again(run, tmp_path, capsys):
    folder, lines, _ = run
    remade, start = remake(request_of(folder, 2), tmp_path)  # from the first weights
    assert remade.metrics["actor/grad_norm"] == lines[1]["actor/grad_norm"]
    assert start == tmp_path / "global_step_1"
    assert main([str(folder), "--step", "2", "algorithm.adv_estimator=rloo"]) == 0
    said = capsys.readouterr().out
    assert "as recorded, bit for bit" in said
    assert f"gradient norm {lines[1]['actor/grad_norm']}" in said
    assert "cosine, gradient" in said


def test_the_same_settings_give_the_same_gradient_and_others_another(run, tmp_path):
    folder, _, _ = run
    request = request_of(folder, 3)
    real, _ = remake(request, tmp_path / "real")
    same, _ = remake(request_of(folder, 3, ["algorithm.adv_estimator=grpo"]), tmp_path / "same")
    other, _ = remake(
        request_of(folder, 3, overrides_of("gspo", ["actor.clip_ratio=0.1"])), tmp_path / "other"
    )
    assert cosine(real.gradient, same.gradient) == pytest.approx(1, abs=1e-12)
    assert all(map(torch.equal, real.change, same.change))
    assert 0 < cosine(real.gradient, other.gradient) < 1 - 1e-6
    assert torch.equal(real.batch.batch["advantages"], other.batch.batch["advantages"])


def test_a_cosine_worked_by_hand():
    ours, theirs = (
        [torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])],
        [torch.ones(1), torch.ones(1, 2)],
    )
    assert cosine(ours, theirs) == pytest.approx(7 / (5 * 3**0.5), abs=1e-12)
    assert cosine(ours, [torch.zeros(1), torch.zeros(1, 2)]) == 0


def test_what_was_recorded_otherwise_is_named(run, tmp_path, capsys):
    folder, _, _ = run
    changed = tmp_path / "changed"
    changed.mkdir()
    shutil.copytree(folder / "global_step_2", changed / "global_step_2")
    shutil.copy(folder / FILE_NAME, changed)
    with sqlite3.connect(changed / FILE_NAME) as connection:
        connection.execute("UPDATE steps SET metrics = json_set(metrics, '$.\"actor/lr\"', 7.0)")
    assert main([str(changed), "--step", "3"]) == 1
    assert "differs: actor/lr: 0.01, recorded 7.0" in capsys.readouterr().out


def test_what_is_missing_is_named(run, tmp_path, capsys):
    folder, _, _ = run
    assert main([str(folder), "--step", "9"]) == 2
    assert "has no step 9; it has 1 to 3" in capsys.readouterr().err
    assert main([str(folder), "--step", "2", "--algorithm", "gpso"]) == 2
    assert "must be an advantage estimator (" in capsys.readouterr().err
    assert main([str(folder), "--step", "2", "actor.clip_ratoi=0.1"]) == 2
    assert "did you mean actor_rollout_ref.actor.clip_ratio?" in capsys.readouterr().err
    assert main([str(folder), "--step", "2", "actor.optim.betas=[0.9"]) == 2
    assert "is no YAML: expected ',' or ']'" in capsys.readouterr().err
    assert main([str(folder), "--step", "2", "--algorithm", "gae"]) == 2
    assert "need a critic, and the run trained none" in capsys.readouterr().err
    assert main([str(folder), "--step", "2", "--algorithm", "dro"]) == 2
    assert "error: the policy loss dro needs policy_loss.dro_beta" in capsys.readouterr().err
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / FILE_NAME, alone)
    with sqlite3.connect(alone / FILE_NAME) as connection:
        connection.execute("DELETE FROM steps WHERE step = 1")
    assert main([str(alone), "--step", "3"]) == 2
    said = capsys.readouterr().err
    assert "needs the weights before it: a checkpoint of step 2" in said
    assert "no checkpoint, and step 1 is not recorded" in said


def test_columns_that_the_store_has_no_place_for_are_named(run):
    folder, _, batch = run
    facts, samples = StoreReader(folder / FILE_NAME).recorded_batch(3)
    assert facts["missing"] == []
    assert len(samples) == len(batch)
