"""One role saves what it is told to save, and continues from it exactly, random draws included."""

import json
import random
import time

import numpy as np
import pytest
import torch

from tests.tiny_models import tiny_model
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.trainer import CheckpointConfig
from verl.utils.checkpoint.checkpoint_manager import (
    BaseCheckpointManager,
    capture_rng,
    find_latest_ckpt_path,
    get_checkpoint_tracker_filename,
    restore_rng,
    should_save_ckpt_esi,
)
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.checkpoint.layout import CheckpointMismatchError, NoIntactCheckpointError
from verl.utils.checkpoint.store import CheckpointStore, staged_step
from verl.utils.checkpoint.tensor_store import load_state, save_state
from verl.utils.environment import temp_env_var
from verl.workers.engine.optimizer import MasterOptimizer

VOLCENGINE = "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"
SAGEMAKER = "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"


def role(dtype=torch.bfloat16, save=None, load=None, **options):
    """A tiny actor with its optimizer and the manager of its checkpoints."""
    model = tiny_model("qwen2").to(dtype)
    optimizer = MasterOptimizer(
        model.named_parameters(),
        FSDPOptimizerConfig(lr=0.01, lr_scheduler_type="cosine", total_training_steps=10),
    )
    everything = ["model", "optimizer", "extra"]
    config = CheckpointConfig(
        save_contents=save or everything, load_contents=load or save or everything
    )
    return (
        model,
        optimizer,
        FSDPCheckpointManager(model, optimizer, checkpoint_config=config, **options),
    )


def of_rank(name):
    return f"{name}.rank_0_of_1.json", f"{name}.rank_0_of_1.safetensors"


def train(model, optimizer):
    """One step on random tokens, so that the random state matters too."""
    ids = torch.randint(3, 90, (1, 6))
    for parameter, scale in zip(model.parameters(), torch.rand(100), strict=False):
        parameter.grad = (parameter.detach() * scale + ids.float().mean() + random.random()).clone()
    optimizer.step(1.0)
    optimizer.schedule.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_role_continues_bit_for_bit_from_a_committed_step(tmp_path, dtype):
    model, optimizer, manager = role(dtype)
    train(model, optimizer)
    store = CheckpointStore(tmp_path, fingerprint={})
    with store.saving(1) as folder:
        manager.save_checkpoint(str(folder / "actor"), global_step=1)
    train(model, optimizer)

    other, other_optimizer, other_manager = role(dtype)
    addresses = [parameter.data_ptr() for parameter in other.parameters()]
    found = CheckpointStore(tmp_path, fingerprint={}).resume()
    other_manager.load_checkpoint(str(found.path / "actor"))
    train(other, other_optimizer)
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    for name, master in optimizer.masters.items():
        assert torch.equal(other_optimizer.masters[name], master)
    assert other_optimizer.learning_rate == optimizer.learning_rate
    assert [parameter.data_ptr() for parameter in other.parameters()] == addresses


@pytest.mark.parametrize(
    ("contents", "files"),
    [
        (["model"], {"huggingface"}),
        (["hf_model", "extra"], {"huggingface", *of_rank("extra")}),
        (["optimizer"], {"huggingface", "optimizer.json", *of_rank("optimizer")}),
    ],
)
def test_only_what_the_config_names_is_saved(tmp_path, contents, files):
    _, _, manager = role(save=contents, load=[])
    manager.save_checkpoint(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == files
    has_weights = (tmp_path / "huggingface" / "model.safetensors").exists()
    assert has_weights == bool({"model", "hf_model"} & set(contents))
    assert json.loads((tmp_path / "huggingface" / "config.json").read_text())["model_type"]


def test_only_what_the_config_names_is_loaded(tmp_path):
    model, optimizer, manager = role()
    train(model, optimizer)
    manager.save_checkpoint(str(tmp_path))
    _, other_optimizer, other_manager = role(load=["optimizer"])
    random.seed(7)
    expected = random.getstate()
    other_manager.load_checkpoint(str(tmp_path))
    assert random.getstate() == expected
    assert other_optimizer.learning_rate == optimizer.learning_rate


def test_weights_are_loaded_without_an_optimizer_s_state(tmp_path):
    model, optimizer, manager = role(save=["model"])
    train(model, optimizer)
    manager.save_checkpoint(str(tmp_path))
    other, _, other_manager = role(save=["model"])
    other_manager.load_checkpoint(str(tmp_path))
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))


def test_asking_for_what_was_not_saved_is_refused(tmp_path):
    role(save=["model"])[2].save_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointMismatchError, match=r"holds model; .* asks for optimizer, extra"):
        role()[2].load_checkpoint(str(tmp_path))


def test_a_role_without_an_optimizer_cannot_promise_to_save_it():
    with pytest.raises(ValueError, match="this role has none"):
        FSDPCheckpointManager(tiny_model("llama"), None)


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("save_checkpoint", {"hdfs_path": "hdfs://x"}),
        ("save_checkpoint", {"max_ckpt_to_keep": 1}),
        ("load_checkpoint", {"hdfs_path": "hdfs://x"}),
        ("load_checkpoint", {"del_local_after_load": True}),
    ],
)
def test_what_only_the_owner_of_the_step_can_do_is_refused(tmp_path, method, option):
    manager = role()[2]
    with pytest.raises(ValueError, match=next(iter(option))):
        getattr(manager, method)(str(tmp_path), **option)


class FolderManager(BaseCheckpointManager):
    """What a user's own manager may look like."""

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        with open(f"{local_path}/weights", "w") as file:
            file.write(str(global_step))
        self.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False):
        raise NotImplementedError


def test_a_subclass_counts_what_it_saved_and_deletes_the_oldest(tmp_path):
    manager = FolderManager(model=None, optimizer=torch.optim.SGD([torch.zeros(1)]))
    for step in (1, 2, 3):
        (tmp_path / str(step)).mkdir()
        manager.save_checkpoint(str(tmp_path / str(step)), global_step=step, max_ckpt_to_keep=2)
    assert manager.previous_saved_paths == [str(tmp_path / "2"), str(tmp_path / "3")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    manager.ensure_checkpoint_capacity(None)
    manager.ensure_checkpoint_capacity(3)  # there is room for one more
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    manager.ensure_checkpoint_capacity(2)
    manager.ensure_checkpoint_capacity(1)  # the only one stays until the next is complete
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
    with pytest.raises(ValueError, match="is not there"):
        manager.register_checkpoint(str(tmp_path / "9"), 1)


def test_contents_are_read_from_the_config():
    manager = role(save=["model", "hf_model"], load=["model"])[2]
    saved = [manager.should_save_model, manager.should_save_optimizer, manager.should_save_extra]
    assert saved == [True, False, False]
    assert manager.should_save_hf_model
    loaded = [manager.should_load_model, manager.should_load_optimizer, manager.should_load_extra]
    assert loaded == [True, False, False]


def test_the_random_state_is_captured_and_restored():
    state = BaseCheckpointManager.get_rng_state()
    expected = torch.rand(3).tolist()
    BaseCheckpointManager.load_rng_state(state)
    assert torch.rand(3).tolist() == expected
    assert {"cpu", "numpy", "random"} <= state.keys()


def test_the_latest_path_is_the_newest_intact_step(tmp_path):
    assert find_latest_ckpt_path(None) is None
    assert find_latest_ckpt_path(str(tmp_path)) is None
    for step in (1, 2):
        with staged_step(tmp_path, step, fingerprint={}) as folder:
            (folder / "a").write_text(str(step))
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_2")
    (tmp_path / "global_step_2" / "a").write_text("9")
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_1")
    (tmp_path / "global_step_1" / "a").write_text("9")
    with pytest.raises(NoIntactCheckpointError):
        find_latest_ckpt_path(str(tmp_path))


def test_the_tracker_file_lies_in_the_root():
    name = get_checkpoint_tracker_filename("/runs/a")
    assert name == "/runs/a/latest_checkpointed_iteration.txt"


@pytest.mark.parametrize(
    ("variable", "remaining", "step_seconds", "expected"),
    [
        (VOLCENGINE, 100, 50, True),  # 50 + 60 + 10 = 120 seconds are needed
        (VOLCENGINE, 119, 50, True),
        (VOLCENGINE, 130, 50, False),
        (VOLCENGINE, -10, 50, False),
        (VOLCENGINE, 100, 0, False),
        (SAGEMAKER, 100, 50, True),
        (SAGEMAKER, 130, 50, False),
        (SAGEMAKER, -10, 50, True),
        (SAGEMAKER, 60, 0, True),
    ],
)
def test_a_save_is_due_before_a_rented_instance_ends(variable, remaining, step_seconds, expected):
    with temp_env_var(variable, str(int(time.time() + remaining))):
        assert should_save_ckpt_esi(step_seconds, redundant_time=10) is expected


def test_no_save_is_due_on_an_instance_without_an_end():
    assert should_save_ckpt_esi(50) is False
    with temp_env_var(VOLCENGINE, "0"):
        assert should_save_ckpt_esi(50) is False


def test_an_end_that_is_no_time_counts_as_not_set():
    with temp_env_var(SAGEMAKER, "tomorrow"):
        assert should_save_ckpt_esi(30.0) is False


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw():
    return (
        [random.random(), random.gauss(0, 1), random.getrandbits(70)],
        [*np.random.random(3), np.random.standard_normal()],
        torch.rand(5).tolist(),
        torch.randn(3).tolist(),
    )


def test_draws_continue_after_restoring_from_disk(tmp_path):
    seed_all(1)
    draw()  # leaves a second Gaussian waiting in `random` and NumPy
    save_state(tmp_path, "rng", capture_rng())
    expected = draw()
    assert draw() != expected
    restore_rng(load_state(tmp_path, "rng"))
    assert draw() == expected


def test_capturing_draws_nothing():
    seed_all(5)
    expected = draw()
    seed_all(5)
    capture_rng()
    assert draw() == expected


def test_a_different_number_of_devices_is_refused():
    state = {**capture_rng(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * 3}
    if torch.cuda.device_count() != 3:
        with pytest.raises(ValueError, match="3 CUDA devices was saved"):
            restore_rng(state)


@pytest.mark.gpu
def test_draws_on_the_gpu_continue_too(tmp_path):
    torch.cuda.manual_seed(4)
    torch.rand(3, device="cuda")
    save_state(tmp_path, "rng", capture_rng())
    expected = torch.rand(7, device="cuda").tolist()
    restore_rng(load_state(tmp_path, "rng"))
    assert torch.rand(7, device="cuda").tolist() == expected
