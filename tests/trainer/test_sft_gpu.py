"""On a real GPU: supervised training runs in kernels, and learns what it learns without them."""

import pytest
import torch

from tests.trainer.sft_cases import engine_trainer, write_model
from verl.models.fused_norms import FusedForward

pytestmark = pytest.mark.gpu

STEPS = range(1, 5)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def on_device(name, model_folder, folder, **changes):
    folder.mkdir()
    return engine_trainer(
        model_folder,
        folder,
        **{"trainer.device": name, "engine.dtype": "float32", **changes},
    )


@pytest.mark.parametrize("changes", [{}, {"model.lora_rank": 4, "model.lora_alpha": 8}])
def test_losses_are_those_of_a_cpu(model_folder, tmp_path, changes):
    on_cpu = on_device("cpu", model_folder, tmp_path / "cpu", **changes)
    on_gpu = on_device("cuda", model_folder, tmp_path / "gpu", **changes)
    fused = [m for m in on_gpu.engine.module.modules() if isinstance(m.forward, FusedForward)]
    assert fused
    assert next(on_gpu.engine.module.parameters()).dtype == torch.float32
    losses = [[sft.train_step(step)["train/loss"] for step in STEPS] for sft in (on_cpu, on_gpu)]
    assert losses[0][-1] < 0.97 * losses[0][0]  # it learns
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_run_continues_from_its_checkpoint_with_the_same_losses(model_folder, tmp_path):
    """Query, key and value are one product: the checkpoint has the single weights."""
    changes = {"trainer.save_freq": 2, "engine.dtype": "bfloat16"}
    first = on_device("cuda", model_folder, tmp_path / "run", **changes)
    for step in first.steps():
        if step == 2:
            break
    rest = [first.train_step(step)["train/loss"] for step in (3, 4)]
    second = engine_trainer(model_folder, tmp_path / "run", **{"trainer.device": "cuda", **changes})
    assert second.checkpoints.resume()[0] == 2
    assert [second.train_step(step)["train/loss"] for step in (3, 4)] == pytest.approx(
        rest, rel=1e-3
    )
