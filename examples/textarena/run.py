"""Watch a language model learn to play a game of textarena, on two CPU cores.

    python examples/textarena/run.py [--seed 0] [--sham] [--out runs/textarena]

Prepares a small model and its games, fine-tunes it on games of which most are played at random,
and trains it with GRPO in `verl.trainer.main_ppo`: the loop `env_agent` lets it play against the
environment. Each command is printed before it runs; what it writes goes to a log file, which is
shown when it fails.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_agent"))

from tiny_game import GameRun, follow, options_of

ROLLOUT = "actor_rollout_ref.rollout"


def main() -> None:
    options = options_of(
        "Learn a game of textarena.", "textarena", "sham", grpo_steps=35, prompts_per_step=32
    )
    run = GameRun("textarena", options)

    def train() -> str:
        run.prepare(run.here / "prepare.py", *(["--sham"] if options.sham else []))
        settings = {
            "data.max_prompt_length": 64,
            f"{ROLLOUT}.agent.default_agent_loop": "env_agent",
            f"{ROLLOUT}.multi_turn.max_assistant_turns": 8,
        }
        return run.reinforce(run.fine_tune(), run.here / "reward.py", **settings)

    follow(run, train)


if __name__ == "__main__":
    main()
