"""What code written for this interface relies on: registries, workers, checkpoints, data."""

from enum import Enum
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from tests.registries import restored
from tests.tiny_tokenizer import tiny_tokenizer
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.sft import SFTConfig
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs
from verl.single_controller.ray.base import create_colocated_worker_raw_cls
from verl.trainer.main_ppo import create_rl_sampler
from verl.trainer.ppo import core_algos, metric_utils
from verl.trainer.ppo.checkpointing import RunCheckpoints
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.dataset.sft_dataset import SFTDataset
from verl.utils.rollout_skip import RolloutSkip


class Name(Enum):
    MINE = "mine"


def first(): ...


def second(): ...


@pytest.mark.parametrize("name", ["ADV_ESTIMATOR_REGISTRY", "POLICY_LOSS_REGISTRY"])
def test_a_registry_behaves_as_a_dict(name):
    registry = vars(core_algos).get(name) or getattr(core_algos, name)
    with restored(registry):
        registry.clear()
        assert len(registry) == 0
        registry.update({"a": first})
        registry["b"] = second
        assert "a" in registry
        assert len(registry) == 2
        assert registry["b"] is second


def test_the_estimators_are_those_of_the_registry_at_the_time_of_the_call(monkeypatch):
    plain = {"gae": first}
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", plain)
    assert core_algos.get_adv_estimator_fn("gae") is first
    core_algos.register_adv_est(Name.MINE)(second)
    core_algos.register_adv_est("mine")(second)
    assert plain == {"gae": first, "mine": second}
    assert core_algos.get_adv_estimator_fn(Name.MINE) is second
    with pytest.raises(ValueError, match="mine"):
        core_algos.register_adv_est("mine")(first)
    with pytest.raises(ValueError, match="Unknown advantage estimator simply: GAE"):
        core_algos.get_adv_estimator_fn("GAE")


def test_an_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="Unknown advantage estimator simply: nope"):
        core_algos.get_adv_estimator_fn("nope")


def batch_of_lengths():
    return DataProto.from_dict(
        {
            "responses": torch.ones(2, 3, dtype=torch.long),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        }
    )


def test_response_info_has_masks_and_lengths():
    info = metric_utils._compute_response_info(batch_of_lengths())
    assert info["response_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert info["prompt_length"].tolist() == [1.0, 2.0]
    assert info["response_length"].tolist() == [2.0, 3.0]
    assert info["prompt_length"].dtype == torch.float32


def test_timing_takes_lengths_through_the_name_of_the_module(monkeypatch):
    lengths = {"prompt_length": torch.tensor([1.0]), "response_length": torch.tensor([10.0])}
    info = {**lengths, "response_mask": torch.ones(1, 10)}
    monkeypatch.setattr(metric_utils, "_compute_response_info", lambda batch: info)
    found = metric_utils.compute_timing_metrics(batch_of_lengths(), {"gen": 5.0})
    assert found["timing_per_token_ms/gen"] == 500.0


def test_a_mesh_name_is_registered_once():
    worker = Worker()
    worker._register_dispatch_collect_info("actor", dp_rank=0, is_collect=True)
    with pytest.raises(AssertionError, match="actor"):
        worker._register_dispatch_collect_info("actor", dp_rank=0, is_collect=True)
    with pytest.raises(AssertionError, match="actor"):
        worker.set_dispatch_collect("actor", {"actor": 0}, {"actor": True})


class Adds(Worker):
    def add(self, x):
        return x + 1


class Doubles(Worker):
    def double(self, x):
        return 2 * x


def test_fused_workers_have_their_roles_as_attributes():
    fused = create_colocated_worker_raw_cls(
        {"actor": RayClassWithInitArgs(Adds), "critic": RayClassWithInitArgs(Doubles)}
    )

    class Both(fused):
        def all(self, x):
            return self.critic.double(self.actor.add(x))

    assert Both().all(3) == 8


@pytest.mark.parametrize("limit", [0, None])
def test_zero_checkpoints_to_keep_is_no_limit(tmp_path, limit):
    manager = object.__new__(BaseCheckpointManager)
    manager.previous_saved_paths = []
    manager.rank = 0
    for step in range(3):
        folder = tmp_path / str(step)
        folder.mkdir()
        manager.ensure_checkpoint_capacity(limit)
        manager.register_checkpoint(str(folder), limit)
    assert len(manager.previous_saved_paths) == 3
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(("limit", "kept"), [(0, [1, 2, 3]), (2, [2, 3])])
def test_options_that_keep_zero_checkpoints_keep_all(tmp_path, limit, kept):
    options = ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep")
    folder = {"default_local_dir": str(tmp_path), **dict.fromkeys(options, limit)}
    loaded = load_config({"trainer": folder}, PPOConfig)
    assert loaded.faults == []
    run = RunCheckpoints(loaded.config, [], {"critic": None})
    for step in (1, 2, 3):
        with run.store.saving(step) as path:
            (path / "weights").write_text("x")
    assert sorted(int(path.name[-1]) for path in tmp_path.glob("global_step_*")) == kept
    assert load_config({"trainer": {"max_ckpt_to_keep": limit}}, SFTConfig).faults == []


def test_a_sampler_of_another_kind_is_refused_for_partial_settings():
    settings = OmegaConf.create({"sampler": {"class_path": __file__, "class_name": "NotASampler"}})
    with pytest.raises(AssertionError, match="AbstractSampler"):
        create_rl_sampler(settings, [1, 2, 3])


class NotASampler:
    def __init__(self, **kwargs): ...


def test_a_list_of_one_element_is_entered(tmp_path):
    path = tmp_path / "x.parquet"
    rows = {
        "prompt": [[{"role": "user", "content": "Hi"}]],
        "answer": [{"text": "Hello"}],
    }
    pd.DataFrame(rows).to_parquet(path)
    settings = {
        "prompt_key": "prompt",
        "prompt_dict_keys": ["content"],
        "response_key": "answer",
        "response_dict_keys": ["text"],
        "max_length": 64,
        "truncation": "right",
    }
    data = SFTDataset(str(path), tiny_tokenizer(), settings)
    assert data._parts(data.rows[0]) == ("Hi", "Hello")


def test_rollout_skip_takes_plain_dicts(tmp_path):
    rollout = {"n": 2, "skip_dump_dir": str(tmp_path)}
    plain = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=rollout),
        data={"gen_batch_size": 4, "train_batch_size": 4},
        trainer={},
    )
    skip = RolloutSkip(plain, SimpleNamespace(generate_sequences=None))
    assert (skip.n, skip.gbs) == (2, 4)
    assert str(skip.curr_path_dump).startswith(str(tmp_path))
