"""An OpenEnv server for tests: guess a number. Run by an interpreter that has openenv-core.

python openenv_server.py PORT
"""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: int


class Hint(Observation):
    hint: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.target = random.Random(seed).randint(1, 16)
        self.count = 0
        return Hint(hint="guess a number from 1 to 16")

    def step(self, action, timeout_s=None, **kwargs):
        self.count += 1
        if action.message == self.target:
            return Hint(hint="win", reward=1.0, done=True)
        return Hint(hint="low" if action.message < self.target else "high", reward=0.0)

    @property
    def state(self):
        return State(step_count=self.count)


if __name__ == "__main__":
    app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
