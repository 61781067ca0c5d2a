"""The standalone example is run as a user runs it: its own folder on the path."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "standalone"
sys.path.insert(0, str(FOLDER))

from algorithm import train  # noqa: E402
from env import GO, score  # noqa: E402


def test_the_reward_is_the_share_of_the_answer_that_is_right():
    assert score([4, GO], [5, 6, 7, 8]) == 1.0
    assert score([8, GO], [9, 0, 1, 2]) == 1.0
    assert score([4, GO], [5, 6, 0, 0]) == 0.5
    assert score([4, GO], [5]) == 0.25


@pytest.mark.slow
def test_a_random_model_learns_to_count():
    rewards = list(train(steps=25))
    assert rewards[0] < 0.15
    assert max(rewards[-5:]) > 0.3


def test_it_takes_less_than_two_hundred_lines():
    files = sorted(FOLDER.glob("*.py"))
    assert [file.name for file in files] == [
        "algorithm.py",
        "env.py",
        "inference.py",
        "training.py",
    ]
    assert sum(len(file.read_text().splitlines()) for file in files) < 200
