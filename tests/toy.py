"""A task that a tiny model learns in seconds: write as many sevens as you can.

`toy_run(folder, ...)` trains through the command's own path and gives what it reported.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tests.tiny_tokenizer import save_tiny_model
from verl.config.presets import PRESETS
from verl.protocol import DataProto
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.recipes import RECIPES
from verl.trainer.task_runner import TaskRunner
from verl.utils.environment import temp_env_var

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    letters = solution_str.replace(" ", "")
    return sum(letter == ground_truth for letter in letters) / 8
"""
PARITY = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 2)
"""
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def write_rows(path: Path, prompts: list[str]) -> Path:
    rows = [
        {"prompt": prompt, "data_source": "sevens", "answer": "7", "extra_info": {"index": i}}
        for i, prompt in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_toy(folder: Path) -> Path:
    """A folder with a model, a reward function and data."""
    save_tiny_model(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    (folder / "parity.py").write_text(PARITY)  # half of all responses, from the first step on
    write_rows(folder / "train.jsonl", [f"{a}+{b}=" for a in range(6) for b in range(4)])
    write_rows(folder / "val.jsonl", [f"{a}-{a}=" for a in range(3)])
    return folder


def toy_overrides(toy: Path, output: Path) -> list[str]:
    """A small run that writes below `output`: two steps of GRPO on four prompts each."""
    return [
        f"data.train_files={toy / 'train.jsonl'}",
        f"data.val_files={toy / 'val.jsonl'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=6",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={toy / 'model'}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"{ACTOR}.optim.lr=0.01",
        f"{ACTOR}.optim.weight_decay=0.0",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=64",
        f"{ROLLOUT}.n=4",
        f"{ROLLOUT}.max_num_seqs=64",
        f"critic.model.path={toy / 'model'}",
        "critic.optim.lr=0.01",
        "critic.model.enable_gradient_checkpointing=false",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={toy / 'reward.py'}",
        "trainer.total_training_steps=2",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={output / 'checkpoints'}",
        f"trainer.experiment_name={output.name}",
        "trainer.val_before_train=false",
    ]


def toy_run(
    toy: Path,
    output: Path,
    *changes: str,
    trainer_class: type[PPOTrainer] = PPOTrainer,
    runner_class: "type[KeepsTrainer] | None" = None,
) -> tuple[list[dict[str, Any]], PPOTrainer]:
    """Train; the metrics of each reported step (`step` among them), and the trainer.

    `changes` are further settings, such as "algorithm.adv_estimator=rloo".
    """
    keeps_batch = type(trainer_class.__name__, (KeepsBatch, trainer_class), {})
    runner = type("Runner", (runner_class or KeepsTrainer,), {"trainer_class": keeps_batch})
    log = output / "metrics.jsonl"
    log.unlink(missing_ok=True)
    with temp_env_var("VERL_FILE_LOGGER_PATH", str(log)):
        run_ppo(OmegaConf.from_dotlist([*toy_overrides(toy, output), *changes]), runner)
    lines = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
    return [{"step": line["step"], **line["data"]} for line in lines], runner.last


def recipe_run(
    toy: Path,
    output: Path,
    recipe: str,
    *changes: str,
    cued: Callable[[type[PPOTrainer]], type[PPOTrainer]] = lambda trainer_class: trainer_class,
) -> tuple[list[dict[str, Any]], PPOTrainer]:
    """`toy_run` with the defaults and the runner of a recipe; `cued` may vary its trainer."""
    runner = runner_of_recipe(recipe)
    values = PRESETS[f"{recipe}_trainer"].values
    defaults = [f"{key}={'null' if value is None else value}" for key, value in values.items()]
    return toy_run(
        toy,
        output,
        *defaults,
        *changes,
        trainer_class=cued(runner.trainer_class),
        runner_class=type("Recipe", (KeepsTrainer, runner), {}),
    )


def runner_of_recipe(name: str) -> type[TaskRunner]:
    """The usual one, if the recipe is settings alone."""
    return RECIPES[name] if name in set(RECIPES) else TaskRunner


class KeepsBatch(PPOTrainer):
    """Lets a test look at the batch of the last step."""

    batch: DataProto | None = None

    def finish_step(self, batch: DataProto | None, step: StepContext) -> None:
        if not self.has_data_ended:
            self.batch = batch
        super().finish_step(batch, step)


class KeepsTrainer(TaskRunner):
    """Lets a test look at the trainer afterwards."""

    last: Any = None

    def build(self, config: Any) -> PPOTrainer:
        type(self).last = super().build(config)
        return self.last


def weights(trainer: PPOTrainer) -> dict[str, Any]:
    """The policy's parameters, copied."""
    module = trainer.actor_rollout_wg.workers[0].engine.module
    return {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
