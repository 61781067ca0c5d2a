"""Synchronous against asynchronous training on one device, with lengths of a heavy tail.

    python -m benchmarks.gpu.async_steps --out async.json [--staleness 1 3] [--steps 8]

The real command, the same prompts, lengths and tokens; `colocate_async` with these numbers of
batches ahead beside the synchronous run. Seconds per step are of all steps, from the log's own
times: the first, in which nothing is ready, and the last, which have nothing left to overlap with,
count too. With `--keep` also with keys and values kept across updates.
"""

import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import trainer_step
from benchmarks.gpu.measuring import environment, write
from benchmarks.gpu.workload import Workload, hf_tokenizer, vocabulary_of, workload_parser
from verl.trainer import plan_async
from verl.trainer.ppo.asynchronous import TIMELINE

KEPT = (
    "timing_s/step",
    "timing_s/gen",
    "timing_s/settle",
    "timing_s/update_actor",
    "response_length/mean",
    "response_length/max",
    "training/off_policy/trajectory_spans/mean",
    "training/off_policy/trajectory_staleness/mean",
)


def mode_settings(staleness: int, kv: str) -> dict[str, Any]:
    if staleness < 0:
        return {}
    rollout = "actor_rollout_ref.rollout"
    return {
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": "colocate_async",
        "trainer.v1.colocate_async.num_warmup_batches": staleness,
        "algorithm.rollout_correction.bypass_mode": True,
        f"{rollout}.free_cache_engine": False,
        **({f"{rollout}.kv_after_update": kv} if kv != "recompute" else {}),
    }


def predictions(timeline: Path, ahead: Sequence[int]) -> dict[str, float]:
    """Seconds per step that one run foretells for the others."""
    plan, steps = plan_async.read_timeline(timeline)
    costs = plan_async.fitted((plan, steps))
    return {
        f"ahead_{number}": plan_async.predict(
            dataclasses.replace(plan, staleness=float(number)), steps, costs
        ).seconds_per_step
        for number in ahead
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = workload_parser(__doc__.partition("\n")[0])
    parser.add_argument("--micro-tokens", type=int, default=43008)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sync-steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=0, help="steps that do not count")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--median", type=int, default=300)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--timeout", type=float, default=400.0)
    options = parser.parse_args(arguments)
    work = Workload.of(options)
    plain_settings = trainer_step.settings
    modes = [("warm_up", -1, "recompute"), ("sync", -1, "recompute")]
    modes += [(f"ahead_{s}", s, "recompute") for s in options.staleness]
    modes += [(f"ahead_{s}_keep", s, "keep") for s in options.staleness if options.keep]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer_step.write_model(folder / "model", options)
        hf_tokenizer(vocabulary_of(options.shape)).save_pretrained(folder / "tokenizer")
        trainer_step.write_prompts(folder / "prompts.parquet", work, options)
        loops = folder / "loops.yaml"
        target = "benchmarks.long_tail.LongTailLoop"
        entry = {"name": "long_tail", "_target_": target, "median": options.median}
        loops.write_text(json.dumps([entry]))
        all_steps = options.steps
        for label, staleness, kv in modes:
            options.steps = options.sync_steps if staleness < 0 else all_steps
            if label == "warm_up":  # kernels are compiled once per machine
                options.steps = 4
            rollout = "actor_rollout_ref.rollout"
            changes = {
                f"{rollout}.agent.agent_loop_config_path": loops,
                f"{rollout}.agent.default_agent_loop": "long_tail",
                f"{rollout}.max_num_seqs": work.sequences * (max(staleness, 0) + 1),
                "trainer.experiment_name": label,
                "trainer.default_local_dir": folder / label,
                **mode_settings(staleness, kv),
            }
            trainer_step.settings = lambda *args, changes=changes: {
                **plain_settings(*args),
                **changes,
            }
            (folder / "metrics.jsonl").unlink(missing_ok=True)
            start = time.perf_counter()
            steps = trainer_step.train(folder, work, options)
            seconds = [step["timing_s/step"] for step in steps[options.warm_up :]]
            found[label] = {
                "seconds_per_step": sum(seconds) / len(seconds),
                "run_seconds": time.perf_counter() - start,
                "steps": [{key: step[key] for key in KEPT if key in step} for step in steps],
            }
            timeline = folder / label / TIMELINE
            if timeline.exists():
                found[label]["predicts"] = predictions(timeline, [0, *options.staleness])
            base = found.get("sync", found[label])
            ratio = found[label]["seconds_per_step"] / base["seconds_per_step"]
            found[label]["ratio_to_sync"] = ratio
            print(label, f"{found[label]['seconds_per_step']:.2f} s a step, {ratio:.2f} of sync",
                  flush=True)  # fmt: skip
            write(
                options.out,
                {
                    "shape": options.shape,
                    "workload": dataclasses.asdict(work),
                    "median": options.median,
                    "modes": found,
                    "environment": environment(options.device, options.seed),
                },
            )


if __name__ == "__main__":
    main()
