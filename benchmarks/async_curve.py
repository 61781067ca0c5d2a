"""What staleness costs in learning: final reward against batches ahead, several seeds each.

    OMP_NUM_THREADS=1 python -m benchmarks.async_curve --out curve.json [--steps 40] [--seeds 5]

The toy of the tests (write as many sevens as you can, a model of 30,000 weights) with lengths of a
heavy tail, in one process: the same prompts, seeds and lengths for every number of batches ahead.
Two corrections: `bypass` takes ratios against the policy that sampled, `decoupled` clips against
the policy before the update and weights by its ratio to the one that sampled. `control` has a
learning rate of 0. The reward is the mean of the last five steps.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tests.toy import ACTOR, ROLLOUT, make_toy, toy_run
from verl.trainer.ppo.asynchronous import AsyncTrainer

CORRECTIONS = {
    "bypass": ["algorithm.rollout_correction.bypass_mode=true"],
    "decoupled": ["algorithm.rollout_correction.rollout_is=token"],
    "control": ["algorithm.rollout_correction.bypass_mode=true", f"{ACTOR}.optim.lr=0.0"],
}
AHEAD = [("bypass", 0), ("bypass", 1), ("bypass", 2), ("bypass", 4), ("decoupled", 4)]


def run(folder: Path, correction: str, ahead: int, seed: int, steps: int) -> dict[str, float]:
    (folder / "loops.yaml").write_text(
        json.dumps(
            [
                {
                    "name": "long_tail",
                    "_target_": "benchmarks.long_tail.LongTailLoop",
                    "median": 6,
                    "spread": 0.8,
                }
            ]
        )
    )
    output = folder / f"{correction}-{ahead}-{seed}"
    output.mkdir()
    start = time.perf_counter()
    metrics, _ = toy_run(
        folder,
        output,
        *CORRECTIONS[correction],
        f"trainer.total_training_steps={steps}",
        "trainer.use_v1=true",
        "trainer.v1.trainer_mode=colocate_async",
        f"trainer.v1.colocate_async.num_warmup_batches={ahead}",
        f"{ROLLOUT}.agent.agent_loop_config_path={folder / 'loops.yaml'}",
        f"{ROLLOUT}.agent.default_agent_loop=long_tail",
        "data.max_response_length=48",
        f"data.seed={seed}",
        "trainer.total_epochs=1000",
        trainer_class=AsyncTrainer,
    )
    last = metrics[-5:]
    ages = [step["training/off_policy/trajectory_staleness/mean"] for step in metrics]
    spans = [step["training/off_policy/trajectory_spans/mean"] for step in metrics]
    worst = [step["training/off_policy/trajectory_staleness_worst/max"] for step in metrics]
    return {
        "reward": fmean(step["critic/score/mean"] for step in last),
        "first_reward": metrics[0]["critic/score/mean"],
        "seconds": time.perf_counter() - start,
        "mean_age": fmean(ages),
        "mean_span": fmean(spans),
        "largest_age": max(
            s["training/off_policy/trajectory_staleness_worst/max"] for s in metrics
        ),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = make_toy(Path(name))
        for correction, ahead in [*AHEAD, ("control", 4)]:
            runs = [
                run(folder, correction, ahead, seed, options.steps)
                for seed in range(1, options.seeds + 1)
            ]
            rewards = [one["reward"] for one in runs]
            line: dict[str, Any] = {"correction": correction, "ahead": ahead, "runs": runs}
            line["reward"] = fmean(rewards)
            line["deviation"] = stdev(rewards) if len(rewards) > 1 else 0.0
            found.append(line)
            print(correction, ahead, f"{line['reward']:.3f} +- {line['deviation']:.3f}", flush=True)
            options.out.write_text(json.dumps({"steps": options.steps, "lines": found}, indent=1))


if __name__ == "__main__":
    main()
