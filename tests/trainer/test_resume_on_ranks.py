"""A run saved on two ranks continues on one, and the other way round."""

import pytest
import torch

from tests.toy import ACTOR, toy_run
from verl.utils.checkpoint.piece_files import saved_world_size
from verl.utils.checkpoint.tensor_store import load_state

TWO_RANKS = ["trainer.n_gpus_per_node=2", "trainer.controller=local"]
SAVES = ["trainer.save_freq=2", "trainer.total_training_steps=4"]


def steps(metrics):
    return [(step["step"], step["critic/score/mean"], step["actor/grad_norm"]) for step in metrics]


@pytest.mark.slow
@pytest.mark.parametrize("is_async", ["false", "true"])
def test_ranks_and_one_process_take_over_from_each_other(toy, tmp_path, is_async):
    asynchronous = f"{ACTOR}.checkpoint.async_save={is_async}"
    changes = [*SAVES, asynchronous]
    straight, _ = toy_run(toy, tmp_path / "straight", *changes)
    for name, first, second in (("two_one", TWO_RANKS, []), ("one_two", [], TWO_RANKS)):
        folder = tmp_path / name
        folder.mkdir()
        begun, _ = toy_run(toy, folder, *changes, *first, "trainer.total_training_steps=2")
        saved = folder / "checkpoints" / "global_step_2" / "actor"
        assert saved_world_size(saved, "optimizer") == (2 if first else 1)
        resumed, _ = toy_run(toy, folder, *changes, *second)
        found = torch.tensor(steps(begun) + steps(resumed))
        torch.testing.assert_close(found, torch.tensor(steps(straight)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_equal_runs_on_two_ranks_save_equal_random_state(toy, tmp_path):
    def states(name):
        (tmp_path / name).mkdir()
        toy_run(toy, tmp_path / name, *TWO_RANKS, "trainer.save_freq=1")
        saved = tmp_path / name / "checkpoints" / "global_step_2" / "actor"
        return [load_state(saved, f"extra.rank_{rank}_of_2")["rng"] for rank in range(2)]

    one, other = states("one"), states("other")
    for rank in range(2):
        assert one[rank]["random"] == other[rank]["random"]
        assert torch.equal(one[rank]["cpu"], other[rank]["cpu"])
        keys = [state[rank]["numpy"]["state"]["key"] for state in (one, other)]
        assert (keys[0] == keys[1]).all()
    assert one[0]["random"] != one[1]["random"]
