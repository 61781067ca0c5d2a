"""Watch a language model learn to use a tool, on two CPU cores, through a real MCP server.

    python examples/guess_number/run.py [--seed 0] [--sham] [--out runs/guess_number]

Prepares a small model and its games, fine-tunes it on games of which most are played at random,
and trains it with GRPO in `verl.trainer.main_ppo`: each guess is a tool call that the server
answers. Each command is printed before it runs; what it writes goes to a log file, which is shown
when it fails.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import yaml

HERE = Path(os.path.relpath(Path(__file__).parent))
sys.path.insert(0, str(HERE.parent / "quickstart"))

import run as quickstart  # noqa: E402
from plot import bar, curves, read_metrics  # noqa: E402

REWARD = "val-core/guess_number/reward/mean@1"
WINS = "val-aux/guess_number/win/mean@1"
GUESSES = "val-aux/guess_number/guesses/mean@1"


class Run(quickstart.Run):
    """The folder of one run; `sham` has the server answer at random."""

    def __init__(self, folder: Path, recipe: argparse.Namespace) -> None:
        super().__init__(folder, quickstart.Recipe(seed=recipe.seed))
        self.options = recipe

    def prepare(self) -> None:
        seed = ["--seed", str(self.options.seed)]
        self.call("model", [str(HERE / "prepare.py"), "--out", str(self.folder), *seed])
        sham = ["--sham"] if self.options.sham else []
        server = [str(HERE / "server.py"), self.path("targets.json"), *sham]
        servers = {"mcpServers": {"guess": {"command": sys.executable, "args": server}}}
        Path(self.path("mcp_servers.json")).write_text(json.dumps(servers))
        tools = {
            "tools": [
                {
                    "class_name": "guess_tool.GuessTool",
                    "config": {"type": "mcp", "timeout": 30},
                    "mcp": {"mcp_servers_config_path": self.path("mcp_servers.json")},
                }
            ]
        }
        Path(self.path("tools.yaml")).write_text(yaml.safe_dump(tools))
        paths = filter(None, (str(HERE.resolve()), os.environ.get("PYTHONPATH")))
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # where guess_tool is

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
            "custom_reward_function.path": str(HERE / "reward.py"),
            "actor_rollout_ref.model.path": model,
            "actor_rollout_ref.model.enable_gradient_checkpointing": False,
            "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 256,
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.actor.optim.lr_warmup_steps": 3,
            "actor_rollout_ref.actor.optim.betas": "[0.9,0.99]",
            "actor_rollout_ref.actor.optim.weight_decay": 0.0,
            "actor_rollout_ref.rollout.n": 8,
            "actor_rollout_ref.rollout.max_num_seqs": 256,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 256,
            "actor_rollout_ref.rollout.multi_turn.enable": True,
            "actor_rollout_ref.rollout.multi_turn.tool_config_path": self.path("tools.yaml"),
            "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 7,
            "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
            "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
            "trainer.total_training_steps": steps,
            "trainer.test_freq": 5,
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
            "num_turns": [
                {"step": step, "mean": data["num_turns/mean"]}
                for step, data in read_metrics(metrics)
                if "num_turns/mean" in data
            ],
            "seconds": self.seconds,
            "commands": self.commands,
        }


def report(results: dict[str, Any], folder: Path, model: str, seconds: float) -> None:
    first, last = results["validation"][0], results["validation"][-1]
    print(quickstart.transcripts(folder / "transcripts", [first["step"], last["step"]], count=1))
    print("\nstep  games won")
    for entry in results["validation"]:
        wins = entry["wins"]
        print(f"{entry['step']:4}  {bar(wins, 40)} {wins:4.0%}  in {entry['guesses']:.2f} guesses")
    print(
        f"\ngames won {first['wins']:.0%} -> {last['wins']:.0%}, "
        f"guesses {first['guesses']:.2f} -> {last['guesses']:.2f}, in {seconds:.0f} s"
        f"\nnumbers {folder / 'results.json'}\nmodel   {model}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/guess_number"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-steps", type=int, default=200)
    parser.add_argument("--grpo-steps", type=int, default=35)
    parser.add_argument("--prompts-per-step", type=int, default=32)
    parser.add_argument("--sham", action="store_true", help="the server answers at random")
    recipe = parser.parse_args()
    folder = recipe.out
    del recipe.out
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    quickstart.remove_earlier_run(folder)
    start = time.monotonic()
    run = Run(folder, recipe)
    run.prepare()
    model = run.reinforce(run.fine_tune())
    results = run.results()
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    report(results, folder, model, time.monotonic() - start)


if __name__ == "__main__":
    main()
