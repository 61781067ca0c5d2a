"""A run saved on two ranks continues on one, and the other way round."""

import pytest
import torch

from tests.toy import ACTOR, toy_run
from verl.utils.checkpoint.piece_files import saved_world_size

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
