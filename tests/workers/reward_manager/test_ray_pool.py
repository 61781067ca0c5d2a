"""Reward functions in actors of a Ray cluster: killed when they hang, replaced when they die."""

import os

import pytest
from omegaconf import OmegaConf

from tests.tiny_tokenizer import tiny_tokenizer
from tests.workers.reward_manager.batches import batch
from verl.workers.reward_manager.adapters import grades_of
from verl.workers.reward_manager.grader import InfraError
from verl.workers.reward_manager.prime import RemoteRewardManager
from verl.workers.reward_manager.workers import RayWorkerPool, is_attached

CONFIG = OmegaConf.create({"reward_model": {"num_workers": 2}})


def test_without_a_cluster_the_processes_are_our_own():
    assert not is_attached()
    assert RemoteRewardManager.options_of(CONFIG) == {"num_workers": 2}


@pytest.mark.ray
@pytest.mark.slow
def test_with_a_cluster_they_are_its_actors(tmp_path, ray_cluster):
    def function(solution_str, **kwargs):
        with open(tmp_path / solution_str, "a") as log:
            log.write("x")
        if solution_str == "5":
            os._exit(9)
        if solution_str == "6":
            import time

            time.sleep(600)
        return {"score": 1.0, "pid": os.getpid()}

    options = RemoteRewardManager.options_of(CONFIG)
    assert options["make_pool"] is RayWorkerPool
    made = RemoteRewardManager(tiny_tokenizer(), 0, function, timeout_seconds=5.0, **options)
    five, six, seven, eight = grades_of(batch("5", "6", "7", "8"), made)
    assert isinstance(five, InfraError)
    assert "4 actors died" in five.reason
    assert (tmp_path / "5").read_text() == "xxxx"
    assert six.is_timeout
    assert seven.value == eight.value == 1.0
    assert os.getpid() not in {seven.extras["pid"], eight.extras["pid"]}
