"""The control: textarena's game, but whether it says "higher" or "lower" is drawn at random."""

import random
from dataclasses import replace
from typing import Any

from verl.environments import Action, Environment, Observation
from verl.environments.base import make_environment

WORDS = ("higher", "lower")


class Sham(Environment):
    """A guess that is right still wins."""

    def __init__(self, **kwargs: Any) -> None:
        self.game = make_environment("textarena:GuessTheNumber-v0", kwargs)
        self.rng = random.Random(0)

    def reset(self, row: Any, seed: int) -> Observation:
        self.rng.seed(seed)
        return self.game.reset(row, seed)

    def step(self, action: Action) -> Observation:
        observation = self.game.step(action)
        said = next((word for word in WORDS if word in (observation.text or "")), None)
        if said is None:
            return observation
        return replace(observation, text=observation.text.replace(said, self.rng.choice(WORDS)))
