"""What scoring while generating saves: seconds per training step with a slow reward function.

    python benchmarks/reward_overlap.py [--output benchmarks/results/reward_overlap.json]

The same run twice: scores in a stage of their own, and as each response ends (the default). More
responses are asked for than the engine takes at once, so responses end in waves, as they do when
their lengths differ. The reward function waits, as one does that asks a service.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from verl.trainer.main_ppo import run_ppo
from verl.trainer.task_runner import TaskRunner
from verl.utils.environment import temp_env_var

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "reward_overlap.json"
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
REWARD = """
import time

def compute_score(solution_str, seconds, **kwargs):
    time.sleep(seconds)
    return len(solution_str) % 3
"""
MANNERS = {
    "in a stage of its own": ["reward_model.use_reward_loop=false"],
    "as each response ends": ["reward_model.use_reward_loop=true"],
}


def prepare(folder: Path) -> None:
    """A small model, a reward function and data."""
    build = ROOT / "examples" / "quickstart" / "build_model.py"
    command = [sys.executable, str(build), "--out", str(folder / "model")]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
    (folder / "reward.py").write_text(REWARD)
    rows = [
        {"prompt": f"{number}+{number}=", "data_source": "sums", "answer": str(2 * number)}
        for number in range(64)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(folder: Path, changes: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the steps after the first, in seconds, and what was scored."""
    log = folder / "metrics.jsonl"
    log.unlink(missing_ok=True)
    settings = [
        f"data.train_files={folder / 'train.jsonl'}",
        "data.val_files=[]",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        f"data.max_response_length={options.response_tokens}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=16",
        f"{ROLLOUT}.n=8",
        f"{ROLLOUT}.max_num_seqs=16",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={folder / 'reward.py'}",
        f"custom_reward_function.reward_kwargs.seconds={options.seconds}",
        f"reward_model.reward_kwargs.num_workers={options.num_workers}",
        f"trainer.total_training_steps={options.steps}",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        *changes,
    ]
    with temp_env_var("VERL_FILE_LOGGER_PATH", str(log)):
        run_ppo(OmegaConf.from_dotlist(settings), TaskRunner)
    steps = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    waits = [s["timing_s/reward"] + s.get("timing_s/reward_wait", 0.0) for s in steps[1:]]
    return {
        "step_seconds": statistics.median(step["timing_s/step"] for step in steps[1:]),
        "waiting_for_scores_seconds": statistics.median(waits),
        "mean_scores": [step["critic/score/mean"] for step in steps],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the JSON")
    parser.add_argument("--seconds", type=float, default=0.2, help="of one call")
    parser.add_argument("--num-workers", type=int, default=8, help="calls at the same time")
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        results = {
            manner: measure(Path(folder), changes, options) for manner, changes in MANNERS.items()
        }
    scores = {tuple(result["mean_scores"]) for result in results.values()}
    assert len(scores) == 1, "the manner of scoring must not change a score"
    show(results)
    report = {
        "command": f"python benchmarks/reward_overlap.py {' '.join(sys.argv[1:])}".strip(),
        "responses_per_step": 64,
        "seconds_per_call": options.seconds,
        "calls_at_the_same_time": options.num_workers,
        "response_tokens": options.response_tokens,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "results": results,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def show(results: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Seconds per step with a slow reward function")
    for name in ("scored", "step", "of it waiting for scores", "saved"):
        table.add_column(name, justify="left" if name == "scored" else "right")
    slowest = results["in a stage of its own"]["step_seconds"]
    for manner, result in results.items():
        saved = 1 - result["step_seconds"] / slowest
        seconds = (result["step_seconds"], result["waiting_for_scores_seconds"])
        table.add_row(manner, *(f"{value:.2f}" for value in seconds), f"{saved:.0%}")
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
