"""A run whose reward function fails now and then trains on what could be graded, and says so."""

import pytest
import torch

from tests.toy import toy_run, weights
from verl.models.loading import load_causal_lm
from verl.trainer.ppo.reward import RewardError
from verl.utils.dataset.tables import DataError

SOMETIMES = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["index"] % 4 == 0:
        raise OSError("the judge is not there")
    if extra_info["index"] % 4 == 1:
        return None
    return float(sum(map(ord, solution_str)) % 2)
"""
SAMPLER = """
from verl.experimental.dataset.sampler import AbstractCurriculumSampler

class Backwards(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        self.count, self.seen = len(data_source), []

    def __iter__(self):
        return iter(range(self.count - 1, -1, -1))

    def __len__(self):
        return self.count

    def update(self, batch):
        self.seen.append(batch.non_tensor_batch["index"].tolist())
"""


def reward(tmp_path, text):
    (tmp_path / "faulty.py").write_text(text)
    return f"custom_reward_function.path={tmp_path / 'faulty.py'}"


def test_prompts_that_cannot_be_graded_are_set_aside_and_the_others_are_trained(toy, tmp_path):
    metrics, trainer = toy_run(toy, tmp_path, reward(tmp_path, SOMETIMES), "data.shuffle=false")
    indices = set(trainer.batch.non_tensor_batch["index"].tolist())
    assert indices == {6, 7}, "of rows 4 to 7 the first raises and the second abstains"
    assert len(trainer.batch) == 8
    for step in metrics:
        assert step["reward/num_groups_set_aside"] == 2.0
        assert step["reward/num_errors"] == 8.0, "four samples, tried twice"
        assert step["reward/num_abstained"] == 4.0
        assert step["critic/score/min"] in (0.0, 1.0), "a fault is no reward"
    assert metrics[-1]["tripwire/reward_errors"] == 2.0


def test_prompts_whose_greedy_response_has_no_score_are_counted(toy, tmp_path):
    text = """
calls = {}
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    index = extra_info["index"]
    calls[index] = calls.get(index, 0) + 1
    if index % 4 == 0 and calls[index] > 1:
        raise OSError("the judge is not there")
    return float(sum(map(ord, solution_str)) % 2)
"""
    changes = ["algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1"]
    once = ["data.shuffle=false", "trainer.total_training_steps=1"]
    (step,), trainer = toy_run(toy, tmp_path, reward(tmp_path, text), *changes, *once)
    assert set(trainer.batch.non_tensor_batch["index"].tolist()) == {1, 2, 3}
    assert step["reward/num_groups_set_aside"] == 1.0


def test_a_function_that_always_fails_stops_the_run_before_any_update(toy, tmp_path):
    broken = reward(tmp_path, "def compute_score(**kwargs): return 'great'\n")
    with pytest.raises(RewardError, match=r"none of 16 responses could be scored: .*returned str"):
        toy_run(toy, tmp_path, broken)


def test_an_unknown_data_source_stops_the_run_with_what_is_known(toy, tmp_path):
    with pytest.raises(DataError, match="no built-in reward function for data_source='sevens'"):
        toy_run(toy, tmp_path, "custom_reward_function.path=null")


def test_a_reward_of_the_whole_batch_trains_too(toy, tmp_path):
    text = "def compute(data):\n    return (data.batch['responses'] % 2).float().mean(1)\n"
    changes = [reward(tmp_path, text), "custom_reward_function.name=compute"]
    metrics, trainer = toy_run(toy, tmp_path, *changes)
    assert 0 < metrics[0]["critic/score/mean"] < 1
    start = dict(load_causal_lm(str(toy / "model")).named_parameters())
    assert any(not torch.equal(tensor, start[name]) for name, tensor in weights(trainer).items())


def test_a_curriculum_learns_from_every_batch(toy, tmp_path):
    (tmp_path / "sampler.py").write_text(SAMPLER)
    changes = [
        f"data.sampler.class_path={tmp_path / 'sampler.py'}",
        "data.sampler.class_name=Backwards",
        "data.dataloader_num_workers=0",
    ]
    _, trainer = toy_run(toy, tmp_path, *changes)
    seen = trainer.train_dataloader.sampler.seen
    assert [sorted(set(batch)) for batch in seen] == [[20, 21, 22, 23], [16, 17, 18, 19]]
