"""Train a policy through a program that only knows the official OpenAI client.

    python examples/program_agent/run.py [--seed 0] [--sandbox] [--out runs/program_agent]

Prepares the model and the games of examples/guess_number, fine-tunes the model on games of which
most are played at random, and trains it with GRPO: each sample is a run of `play.py`, whose calls
go through the gateway to the policy.
"""

import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_agent"))

from tiny_game import GameRun, follow, options_of


def write_rows_and_loop(run: GameRun) -> None:
    """The games of guess_number for `program_agent`, and the program that plays them."""
    for name, num_rows in (("train", None), ("test", run.options.num_test)):
        rows = parquet.read_table(run.path(f"{name}.parquet")).to_pylist()[:num_rows]
        rows = [{**row, "agent_name": "program_agent"} for row in rows]
        parquet.write_table(pa.Table.from_pylist(rows), run.path(f"{name}.parquet"))
    entry = {
        "name": "program_agent",
        "_target_": "verl.server.program_agent.ProgramAgentLoop",
        "command": [sys.executable, str((run.here / "play.py").resolve())],
        "timeout": 120,
        "max_programs": 2 * (os.cpu_count() or 1),
        "sandbox": run.options.sandbox,
    }
    Path(run.path("loops.yaml")).write_text(yaml.safe_dump([entry]))


def main() -> None:
    sizes = {"grpo_steps": 8, "prompts_per_step": 8, "num_test": 48}
    options = options_of("Train a program.", "program_agent", "sandbox", **sizes)
    run = GameRun("program_agent", options)
    game = run.here.parent / "guess_number"

    def train() -> str:
        run.prepare(game / "prepare.py")
        write_rows_and_loop(run)
        settings = {
            "actor_rollout_ref.rollout.agent.agent_loop_config_path": run.path("loops.yaml"),
            "trainer.test_freq": 2,
        }
        return run.reinforce(run.fine_tune(), game / "reward.py", at_once=128, **settings)

    follow(run, train)


if __name__ == "__main__":
    main()
