"""Recipes on a real model: SmolLM2-135M learns short sums by DAPO, by PRIME, and from a teacher.

    python examples/smollm2/prepare.py --out runs/smollm2/model
    python -m benchmarks.gpu.recipes_smollm2 --model runs/smollm2/model --out results
    python -m benchmarks.gpu.recipes_smollm2 --out FOLDER --draw benchmarks/results/gpu/recipes.json

Each recipe is its own command on the data and reward of `examples/smollm2`; the teacher of the
distillation is what DAPO made of the same model, and no reward reaches its student. Accuracy is
that of 64 held-out sums, sampled at temperature 1. One that fails or takes longer than
`--timeout-seconds` has the curve up to there and says why; the others go on.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ACCURACY, REWARD = "val-core/sums/acc/mean@1", "critic/score/mean"
TIMEOUT_SECONDS = 180
STEPS = {"dapo": 40, "prime": 40, "distillation": 20}
MODULES = {
    "dapo": "recipe.dapo.main_dapo",
    "prime": "recipe.prime.main_prime",
    "distillation": "verl.trainer.main_ppo",
}


def settings(name: str, options: argparse.Namespace, steps: int) -> list[str]:
    """What all share, then what makes the recipe."""
    folder, prompts = options.out / name, options.prompts
    common = [
        f"data.train_files={options.out / 'data/train.parquet'}",
        f"data.val_files={options.out / 'data/test.parquet'}",
        f"data.train_batch_size={prompts}",
        "data.max_prompt_length=96",
        "data.max_response_length=16",
        f"custom_reward_function.path={ROOT / 'examples/smollm2/reward.py'}",
        f"actor_rollout_ref.model.path={options.model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"{ACTOR}.ppo_mini_batch_size={prompts}",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=256",
        f"{ACTOR}.optim.lr=1e-5",
        f"{ACTOR}.optim.weight_decay=0.0",
        f"{ROLLOUT}.n=8",
        f"{ROLLOUT}.max_num_seqs=512",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=256",
        f"{ROLLOUT}.val_kwargs.do_sample=true",
        f"{ROLLOUT}.val_kwargs.temperature=1.0",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=5",
        "trainer.val_before_train=true",
        f"trainer.save_freq={steps if name == 'dapo' else -1}",
        f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        f"trainer.default_local_dir={folder}",
        f"trainer.device={options.device}",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[file]",
        f"hydra.run.dir={folder / 'hydra'}",
    ]
    own = {
        "dapo": [f"data.gen_batch_size={2 * prompts}", "reward_model.reward_manager=dapo"],
        "prime": [
            f"reward_model.model.path={options.model}",
            "reward_model.micro_batch_size_per_gpu=256",
            "reward_model.model.optim.lr=1e-6",
            "reward_model.reward_manager=naive",
            "data.oversample_factor=2",
        ],
        "distillation": [
            "algorithm.adv_estimator=grpo",
            "distillation.enabled=true",
            "distillation.distillation_loss.loss_mode=reverse_kl_full",
            "distillation.distillation_loss.use_task_rewards=false",
            f"distillation.teacher_models.teacher_model.model_path={teacher_of(options)}",
        ],
    }
    return [*common, *own[name], *options.settings]


def teacher_of(options: argparse.Namespace) -> Path:
    """What DAPO has saved, or the model itself where it was not run."""
    saved = sorted((options.out / "dapo").glob("global_step_*"))
    return saved[-1] / "actor/huggingface" if saved else options.model


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One recipe by its command; curve and times."""
    steps = options.steps or STEPS[name]
    command = ["-m", MODULES[name], *settings(name, options, steps)]
    log = options.out / name / "metrics.jsonl"
    shutil.rmtree(log.parent, ignore_errors=True)  # or the run would go on from an earlier one
    log.parent.mkdir(parents=True)
    start, failure, text = time.perf_counter(), None, options.out / name / "log.txt"
    try:
        with text.open("w") as output:
            subprocess.run(
                [sys.executable, *command],
                check=True,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=options.timeout_seconds,
                env={**os.environ, "VERL_FILE_LOGGER_PATH": str(log)},
            )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        failure = f"{name}: {type(error).__name__}: {text.read_text(errors='replace')[-2000:]}"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    wanted = {"accuracy": ACCURACY, "reward": REWARD, "seconds": "timing_s/step"}
    return {
        "command": " ".join(["python", *command]).replace(f"{ROOT}/", ""),
        "failure": failure,
        "seconds": round(time.perf_counter() - start, 1),
        "steps": [
            {"step": line["step"]}
            | {key: round(line["data"][m], 4) for key, m in wanted.items() if m in line["data"]}
            for line in lines
        ],
    }


def draw(numbers: Path, picture: Path) -> None:
    """From what this script or `all.py` has written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, 3.2), layout="constrained")
    written = json.loads(numbers.read_text())
    found = written["runs"][-1] if "runs" in written else written
    for name in (name for name in STEPS if name in found):
        points = [(p["step"], p["accuracy"]) for p in found[name]["steps"] if "accuracy" in p]
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.set(xlabel="step", ylabel="held-out accuracy, SmolLM2-135M", ylim=(0, 1.02))
    axes.legend(fontsize=8)
    figure.savefig(picture, dpi=90)
    print(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--steps", type=int, help="instead of each recipe's own number")
    parser.add_argument("--timeout-seconds", type=float, default=TIMEOUT_SECONDS)
    parser.add_argument("--settings", nargs="*", default=[], help="more options of training")
    parser.add_argument("--draw", type=Path, metavar="NUMBERS")
    options = parser.parse_args()
    options.out = options.out.resolve()
    numbers = options.out / "recipes_smollm2.json"
    if options.draw:
        draw(options.draw, options.out / "recipes_smollm2.png")
        return
    options.model = options.model.resolve()
    make_data = [str(ROOT / "examples/smollm2/make_data.py"), "--out", str(options.out / "data")]
    subprocess.run([sys.executable, *make_data], check=True, timeout=60)
    found: dict[str, Any] = {}
    for name in options.only:
        if name == "distillation" and found.get("dapo", {}).get("failure"):
            sys.exit(f"distillation has no teacher: {found['dapo']['failure']}")
        found[name] = run(name, options)
        numbers.write_text(json.dumps(found, indent=1) + "\n")
        curve = [p["accuracy"] for p in found[name]["steps"] if "accuracy" in p]
        print(f"{name}: {curve}, {found[name]['seconds']} s", flush=True)
    failures = [entry["failure"] for entry in found.values() if entry["failure"]]
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
