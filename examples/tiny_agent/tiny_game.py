"""The small model of the games, and the run that trains it: `guess_number`, `textarena` and
`program_agent` say what is played and how.

    prepare.py -> fine-tuning on games of which most are played at random -> GRPO -> games won
"""

import argparse
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from verl.models.loading import random_causal_lm

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))

import run as quickstart
from plot import bar, curves

PAD, START, END = SPECIAL_TOKENS = ["<pad>", "<|im_start|>", "<|im_end|>"]
TURNS_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WINS = "val-aux/guess_number/win/mean@1"
GUESSES = "val-aux/guess_number/guesses/mean@1"
REWARD = "val-core/guess_number/reward/mean@1"


def build_tokenizer(
    texts: Iterator[str], *, vocabulary: int, chat_template: str
) -> PreTrainedTokenizerFast:
    """Bytes, and the pieces of which conversations consist; a number is one token.

    Roles and numbers are pieces of their own, so that what the template writes before a turn and
    what the model writes in it never share a token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"^[a-z]+\n|\d+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> int:
    """A Llama with random weights, and its tokenizer; gives the number of parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.12,  # about 1/sqrt(hidden size)
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(END),
        tie_word_embeddings=True,
    )
    model = random_causal_lm(config, seed=seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


class GameRun(quickstart.Run):
    """The folder of one run of one example, and the commands that fill it."""

    def __init__(self, example: str, options: argparse.Namespace) -> None:
        super().__init__(options.out, quickstart.Recipe(seed=options.seed))
        self.here = Path(os.path.relpath(Path(__file__).parents[1] / example))
        self.options = options

    def prepare(self, script: Path, *more: str) -> None:
        seed = ["--seed", str(self.options.seed)]
        self.call("model", [str(script), "--out", str(self.folder), *seed, *more])

    def fine_tune(self, *, batch: int = 64) -> str:
        """Supervised training on games, `batch` a step; gives the folder of the weights."""
        name, steps = "sft", self.options.sft_steps
        options = {
            "data.train_files": self.path("sft.parquet"),
            "data.val_files": self.path("sft.parquet"),
            "data.val_max_samples": 256,
            "data.multiturn.enable": True,
            "data.train_batch_size": batch,
            "data.micro_batch_size_per_gpu": batch,
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

    def reinforce(self, model: str, reward: Path, *, at_once: int = 256, **more: Any) -> str:
        """GRPO with that reward function; `at_once` sequences are generated, and trained."""
        name, steps, prompts = "grpo", self.options.grpo_steps, self.options.prompts_per_step
        options = {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": self.path("train.parquet"),
            "data.val_files": self.path("test.parquet"),
            "data.train_batch_size": prompts,
            "data.max_prompt_length": 16,
            "data.max_response_length": 96,
            "data.seed": self.options.seed,
            "custom_reward_function.path": str(reward),
            "actor_rollout_ref.model.path": model,
            "actor_rollout_ref.model.enable_gradient_checkpointing": False,
            "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": at_once,
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.actor.optim.lr_warmup_steps": 3,
            "actor_rollout_ref.actor.optim.betas": "[0.9,0.99]",
            "actor_rollout_ref.actor.optim.weight_decay": 0.0,
            "actor_rollout_ref.rollout.n": 8,
            "actor_rollout_ref.rollout.max_num_seqs": at_once,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": at_once,
            "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
            "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
            "trainer.total_training_steps": steps,
            "trainer.test_freq": 5,
            "trainer.save_freq": steps,
            "trainer.validation_data_dir": self.path("transcripts"),
            **more,
            **self.trainer_options(name),
        }
        self.train("verl.trainer.main_ppo", name, options, steps)
        return self.path(f"{name}/global_step_{steps}/actor/huggingface")

    def report(self, model: str, seconds: float) -> None:
        """Write and show what was learnt."""
        metrics = Path(self.path("metrics/grpo.jsonl"))
        results = {
            "recipe": {name: value for name, value in vars(self.options).items() if name != "out"},
            **curves(metrics, REWARD, wins=WINS, guesses=GUESSES),
            "seconds": self.seconds,
            "commands": self.commands,
        }
        (self.folder / "results.json").write_text(json.dumps(results, indent=1))
        first, last = results["validation"][0], results["validation"][-1]
        steps = [first["step"], last["step"]]
        print(quickstart.transcripts(self.folder / "transcripts", steps, count=1))
        print("\nstep  games won")
        for entry in results["validation"]:
            won, guesses = entry["wins"], entry["guesses"]
            print(f"{entry['step']:4}  {bar(won, 40)} {won:4.0%}  in {guesses:.2f} guesses")
        print(
            f"\ngames won {first['wins']:.0%} -> {last['wins']:.0%}, "
            f"guesses {first['guesses']:.2f} -> {last['guesses']:.2f}, in {seconds:.0f} s"
            f"\nnumbers {self.folder / 'results.json'}\nmodel   {model}"
        )


def options_of(description: str, example: str, *flags: str, **defaults: int) -> argparse.Namespace:
    """`--out`, `--seed`, the recipe's numbers, and switches."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path(f"runs/{example}"))
    for name, default in {"seed": 0, "sft_steps": 200, **defaults}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    quickstart.remove_earlier_run(options.out)
    return options


def follow(run: GameRun, train: Callable[[], str]) -> None:
    """Train, then show and write what was learnt."""
    start = time.monotonic()
    model = train()
    run.report(model, time.monotonic() - start)


def draw_games(runs: dict[str, dict[str, Any]], path: Path) -> str:
    """Games won and guesses over the steps, a line for each named run."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: pip install matplotlib"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, name in zip(axes, ("wins", "guesses"), strict=True):
        for label, run in runs.items():
            points = run["validation"]
            axis.plot([p["step"] for p in points], [p[name] for p in points], label=label)
        axis.set_title("games won" if name == "wins" else "guesses")
        axis.set_xlabel("GRPO step")
        axis.grid(alpha=0.3)
    axes[0].set_ylim(0, 1.02)
    axes[1].axhline(3.38, color="grey", linestyle=":", label="best possible")
    axes[1].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw runs: label=results.json ...")
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("curve.png"))
    given = parser.parse_args()
    named = [text.partition("=") for text in given.runs]
    loaded = {label: json.loads(Path(file).read_text()) for label, _, file in named}
    print(draw_games(loaded, given.out))
