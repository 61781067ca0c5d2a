"""Every generator continues where it was captured, also by way of the disk."""

import random

import numpy as np
import pytest
import torch

from verl.utils.checkpoint.checkpoint_manager import capture_rng, restore_rng
from verl.utils.checkpoint.tensor_store import load_state, save_state


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
