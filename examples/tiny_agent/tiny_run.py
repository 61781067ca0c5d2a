"""A run in two parts, which the small tool examples share.

fine-tuning on conversations, few of which use the tool well  ->  GRPO through `tool_agent`
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))

import run as quickstart
from plot import bar, curves, draw


class Run(quickstart.Run):
    """The folder of one run of one example, and the commands that fill it."""

    def __init__(self, example: str, arguments: argparse.Namespace) -> None:
        super().__init__(arguments.out, quickstart.Recipe(seed=arguments.seed))
        self.example = example
        self.here = Path(os.path.relpath(Path(__file__).parents[1] / example))
        self.options = arguments

    def prepare(self, *more: str) -> None:
        seed = ["--seed", str(self.options.seed)]
        script = str(self.here / "prepare.py")
        self.call("model", [script, "--out", str(self.folder), *seed, *more])

    def fine_tune(self) -> str:
        """Supervised training on the conversations; gives the folder of the weights."""
        steps = self.options.sft_steps
        options = {
            "data.train_files": self.path("sft.parquet"),
            "data.val_files": self.path("sft_test.parquet"),
            "data.multiturn.enable": True,
            "data.train_batch_size": 64,
            "data.micro_batch_size_per_gpu": 64,
            "data.max_length": 64,
            "model.partial_pretrain": self.path("model"),
            "model.enable_gradient_checkpointing": False,
            "optim.lr": 3e-3,
            "optim.betas": "[0.9,0.98]",
            "optim.lr_warmup_steps": 20,
            "optim.min_lr_ratio": 0.1,
            "trainer.total_training_steps": steps,
            "trainer.total_epochs": 100,
            "trainer.seed": self.options.seed,
            **self.trainer_options("sft"),
        }
        self.train("verl.trainer.fsdp_sft_trainer", "sft", options, steps)
        return self.path(f"sft/global_step_{steps}/huggingface")

    def reinforce(self, command: str, model: str, tool_config: Path | str) -> str:
        """The recipe's command with the example's reward.py; gives the folder of the weights."""
        steps, prompts = self.options.grpo_steps, self.options.prompts_per_step
        turns = "actor_rollout_ref.rollout.multi_turn"
        options = {
            "data.train_files": self.path("train.parquet"),
            "data.val_files": self.path("test.parquet"),
            "data.train_batch_size": prompts,
            "data.max_prompt_length": 32,
            "data.max_response_length": 64,
            "data.seed": self.options.seed,
            "custom_reward_function.path": str(self.here / "reward.py"),
            "actor_rollout_ref.model.path": model,
            "actor_rollout_ref.model.enable_gradient_checkpointing": False,
            "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 128,
            "actor_rollout_ref.actor.optim.lr": 5e-4,
            "actor_rollout_ref.actor.optim.lr_warmup_steps": 3,
            "actor_rollout_ref.actor.optim.betas": "[0.9,0.99]",
            "actor_rollout_ref.actor.optim.weight_decay": 0.0,
            "actor_rollout_ref.rollout.n": 8,
            "actor_rollout_ref.rollout.max_num_seqs": 256,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 128,
            "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
            "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
            f"{turns}.tool_config_path": tool_config,
            f"{turns}.max_assistant_turns": 3,
            "trainer.total_training_steps": steps,
            "trainer.test_freq": 5,
            "trainer.save_freq": steps,
            "trainer.validation_data_dir": self.path("transcripts"),
            **self.trainer_options("grpo"),
            **dict(setting.split("=", 1) for setting in self.options.settings),
        }
        self.train(command, "grpo", options, steps)
        return self.path(f"grpo/global_step_{steps}/actor/huggingface")

    def results(self) -> dict[str, Any]:
        names = {
            "accuracy": f"val-core/{self.example}/acc/mean@1",
            "called": f"val-aux/{self.example}/called/mean@1",
        }
        recipe = {key: value for key, value in vars(self.options).items() if key != "out"}
        return {
            "recipe": recipe,
            **curves(Path(self.path("metrics/grpo.jsonl")), **names),
            "seconds": self.seconds,
            "commands": self.commands,
        }


def arguments_of(description: str, example: str, **defaults: int) -> argparse.Namespace:
    """`--out`, `--seed`, the recipe's numbers, and settings of the reinforcement (`key=value`)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path(f"runs/{example}"))
    for name, default in {"seed": 0, **defaults}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    quickstart.remove_earlier_run(arguments.out)
    return arguments


def follow(run: Run, train: Callable[[], str]) -> None:
    """Train, then show and write what was learnt."""
    start = time.monotonic()
    model = train()
    results = run.results()
    (run.folder / "results.json").write_text(json.dumps(results, indent=1))
    first, last = results["validation"][0], results["validation"][-1]
    steps = [first["step"], last["step"]]
    print(quickstart.transcripts(run.folder / "transcripts", steps, count=2))
    print("\nstep  held-out questions answered right")
    for entry in results["validation"]:
        shown = bar(entry["accuracy"], 40)
        print(
            f"{entry['step']:4}  {shown} {entry['accuracy']:4.0%}  tool used {entry['called']:.0%}"
        )
    picture = draw([results], run.folder / "curve.png", "held-out accuracy, temperature 1")
    print(
        f"\nright {first['accuracy']:.0%} -> {last['accuracy']:.0%}, tool used "
        f"{first['called']:.0%} -> {last['called']:.0%}, in {time.monotonic() - start:.0f} s"
        f"\ncurve   {picture}\nnumbers {run.folder / 'results.json'}\nmodel   {model}"
    )
