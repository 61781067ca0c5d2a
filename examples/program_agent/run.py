"""Train a policy through a program that only knows the official OpenAI client.

    python examples/program_agent/run.py [--seed 0] [--out runs/program_agent]

Prepares the model and the games of examples/guess_number, fine-tunes the model on games of which
most are played at random, and trains it with GRPO: each sample is a run of `play.py`, whose calls
go through the gateway to the policy.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import yaml

HERE = Path(os.path.relpath(Path(__file__).parent))
GAME = HERE.parent / "guess_number"
sys.path[:0] = [str(HERE.parent / "quickstart")]

import run as quickstart  # noqa: E402
from plot import bar, curves  # noqa: E402

REWARD = "val-core/guess_number/reward/mean@1"
WINS = "val-aux/guess_number/win/mean@1"
GUESSES = "val-aux/guess_number/guesses/mean@1"


class Run(quickstart.Run):
    """The folder of one run."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        super().__init__(folder, quickstart.Recipe(seed=options.seed))
        self.options = options

    def prepare(self) -> None:
        seed = ["--seed", str(self.options.seed)]
        self.call("model", [str(GAME / "prepare.py"), "--out", str(self.folder), *seed])
        for name, num_rows in (("train", None), ("test", self.options.num_test)):
            rows = parquet.read_table(self.path(f"{name}.parquet")).to_pylist()[:num_rows]
            rows = [{**row, "agent_name": "program_agent"} for row in rows]
            parquet.write_table(pa.Table.from_pylist(rows), self.path(f"{name}.parquet"))
        entry = {
            "name": "program_agent",
            "_target_": "verl.server.program_agent.ProgramAgentLoop",
            "command": [sys.executable, str((HERE / "play.py").resolve())],
            "timeout": 120,
            "max_programs": 2 * (os.cpu_count() or 1),
        }
        Path(self.path("loops.yaml")).write_text(yaml.safe_dump([entry]))

    def fine_tune(self) -> str:
        name, steps = "sft", self.options.sft_steps
        options = {
            "data.train_files": self.path("sft.parquet"),
            "data.val_files": self.path("sft.parquet"),
            "data.val_max_samples": 256,
            "data.multiturn.enable": True,
            "data.train_batch_size": 64,
            "data.micro_batch_size_per_gpu": 64,
            "data.max_length": 128,
            "model.partial_pretrain": self.path("model"),
            "model.enable_gradient_checkpointing": False,
            "optim.lr": 3e-3,
            "optim.betas": "[0.9,0.98]",
            "optim.lr_warmup_steps": 20,
            "optim.min_lr_ratio": 0.1,
            "trainer.total_training_steps": steps,
            "trainer.total_epochs": 100,
            "trainer.seed": self.options.seed,
            **self.trainer_options(name),
        }
        self.train("verl.trainer.fsdp_sft_trainer", name, options, steps)
        return self.path(f"{name}/global_step_{steps}/huggingface")

    def reinforce(self, model: str) -> str:
        name, steps, prompts = "grpo", self.options.grpo_steps, self.options.prompts_per_step
        options = {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": self.path("train.parquet"),
            "data.val_files": self.path("test.parquet"),
            "data.train_batch_size": prompts,
            "data.max_prompt_length": 16,
            "data.max_response_length": 96,
            "data.seed": self.options.seed,
            "custom_reward_function.path": str(GAME / "reward.py"),
            "actor_rollout_ref.model.path": model,
            "actor_rollout_ref.model.enable_gradient_checkpointing": False,
            "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 128,
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.actor.optim.lr_warmup_steps": 3,
            "actor_rollout_ref.actor.optim.betas": "[0.9,0.99]",
            "actor_rollout_ref.actor.optim.weight_decay": 0.0,
            "actor_rollout_ref.rollout.n": 8,
            "actor_rollout_ref.rollout.max_num_seqs": 128,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 128,
            "actor_rollout_ref.rollout.agent.agent_loop_config_path": self.path("loops.yaml"),
            "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
            "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
            "trainer.total_training_steps": steps,
            "trainer.test_freq": steps,
            "trainer.save_freq": steps,
            "trainer.validation_data_dir": self.path("transcripts"),
            **self.trainer_options(name),
        }
        self.train("verl.trainer.main_ppo", name, options, steps)
        return self.path(f"{name}/global_step_{steps}/actor/huggingface")

    def results(self) -> dict[str, Any]:
        metrics = Path(self.path("metrics/grpo.jsonl"))
        return {
            "recipe": vars(self.options),
            **curves(metrics, REWARD, wins=WINS, guesses=GUESSES),
            "seconds": self.seconds,
            "commands": self.commands,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/program_agent"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-steps", type=int, default=200)
    parser.add_argument("--grpo-steps", type=int, default=8)
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--num-test", type=int, default=48)
    options = parser.parse_args()
    folder = options.out
    del options.out
    quickstart.remove_earlier_run(folder)
    start = time.monotonic()
    run = Run(folder, options)
    run.prepare()
    model = run.reinforce(run.fine_tune())
    results = run.results()
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    print("\nstep  games won")
    for entry in results["validation"]:
        wins = entry["wins"]
        print(f"{entry['step']:4}  {bar(wins, 40)} {wins:4.0%}  in {entry['guesses']:.2f} guesses")
    seconds = time.monotonic() - start
    print(f"\nin {seconds:.0f} s\nnumbers {folder / 'results.json'}\nmodel   {model}")


if __name__ == "__main__":
    main()
