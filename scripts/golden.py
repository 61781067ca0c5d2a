"""Compare what two trees train: sha256 of the weights after 20 steps, run by run.

    python scripts/golden.py BASE_COMMIT

Checks the commit out beside this tree, trains the same toy model with the same seed in both (GRPO
and PPO with a critic; in one process, and on two ranks with whole and with sharded weights) and
prints a table. A refactor shows equal digests; digests depend on torch and the instruction set,
so they are compared, never stored.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors import safe_open

HERE = Path(__file__).resolve().parent.parent
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
STEPS = 20
TIMEOUT_SECONDS = 600
TWO_RANKS = ("trainer.n_gpus_per_node=2", "trainer.controller=local")
PPO = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    "critic.ppo_micro_batch_size_per_gpu=2",
)
FULL = (f"{ACTOR}.fsdp_config.sharding=full", "critic.model.fsdp_config.sharding=full")
ZERO1 = (f"{ACTOR}.fsdp_config.sharding=zero1", "critic.model.fsdp_config.sharding=zero1")
RUNS = {
    "grpo, one process": (),
    "grpo, small passes": (f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",),
    "grpo, dynamic batch": (
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu=64",
    ),
    "ppo, one process": PPO,
    "grpo, two ranks, zero1": (*TWO_RANKS, *ZERO1),
    "ppo, two ranks, zero1": (*TWO_RANKS, *PPO, *ZERO1),
    "ppo, two ranks, full": (*TWO_RANKS, *PPO, *FULL),
}
MAKE_TOY = (
    "from pathlib import Path; import sys; from tests.toy import make_toy; "
    "Path(sys.argv[1]).mkdir(parents=True); make_toy(Path(sys.argv[1]))"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--only", default="", help="part of the names of the runs to make")
    options = parser.parse_args()
    names = [name for name in RUNS if options.only in name]
    with tempfile.TemporaryDirectory() as folder:
        toy, base = Path(folder) / "toy", Path(folder) / "base"
        git("worktree", "add", "--detach", str(base), options.base)
        try:
            call(base, "-c", MAKE_TOY, str(toy))
            differences = [name for name in names if not is_equal(name, base, toy, Path(folder))]
        finally:
            git("worktree", "remove", "--force", str(base))
    sys.exit(f"{len(differences)} of {len(names)} runs differ" if differences else 0)


def is_equal(name: str, base: Path, toy: Path, folder: Path) -> bool:
    found = [
        digests(train(tree, name, toy, folder / f"{name}-{tree.name}")) for tree in (base, HERE)
    ]
    before, now = found
    for part in before:
        verdict = "equal" if before[part] == now[part] else "DIFFERENT"
        print(f"{name:40s} {part:7s} {before[part][:12]} {now[part][:12]} {verdict}", flush=True)
    return before == now


def train(tree: Path, name: str, toy: Path, output: Path) -> Path:
    """Train in that tree; returns the folder of the last checkpoint."""
    output = Path(str(output).replace(" ", "_").replace(",", ""))
    settings = [
        f"data.train_files={toy / 'train.jsonl'}",
        f"data.val_files={toy / 'val.jsonl'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=6",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={toy / 'model'}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"{ACTOR}.optim.lr=0.01",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=64",
        f"{ROLLOUT}.n=4",
        f"{ROLLOUT}.max_num_seqs=64",
        f"critic.model.path={toy / 'model'}",
        "critic.optim.lr=0.01",
        "critic.model.enable_gradient_checkpointing=false",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={toy / 'reward.py'}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=100",
        f"trainer.save_freq={STEPS}",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={output}",
        "trainer.val_before_train=false",
    ]
    call(tree, "-m", "verl.trainer.main_ppo", *settings, *RUNS[name])
    return output / f"global_step_{STEPS}"


def digests(checkpoint: Path) -> dict[str, str]:
    """The sha256 of weights and optimizer state of the actor and the critic, in order of name."""
    found: dict[str, str] = {}
    for part in ("actor", "critic"):
        files = sorted(
            file
            for file in (checkpoint / part).rglob("*.safetensors")
            if not file.name.startswith("extra")  # generators of ranks
        )
        if not files:
            continue
        digest = hashlib.sha256()
        for file in files:
            with safe_open(file, framework="numpy") as tensors:
                for key in sorted(tensors.keys()):
                    digest.update(key.encode() + tensors.get_tensor(key).tobytes())
        found[part] = digest.hexdigest()
    assert found, f"no weights below {checkpoint}"
    return found


def call(tree: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode:
        sys.exit(f"{tree}: {' '.join(arguments[:2])} failed:\n{done.stderr[-3000:]}")


def git(*arguments: str) -> None:
    subprocess.run(
        ["git", "-C", str(HERE), *arguments], check=True, capture_output=True, timeout=60
    )


if __name__ == "__main__":
    main()
