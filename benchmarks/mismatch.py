"""Learning from an engine that rounds its weights to 4 bits, with and without rollout correction.

    python -m benchmarks.mismatch --output benchmarks/results/mismatch.json \
        --picture docs/algorithms/mismatch.png

The game and its exact expected reward are in `tests/e2e/bandit.py`: three of twelve tokens, the
reward is the share of sevens. Seeds are fixed, so the numbers are the same on every run.
"""

import argparse
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.controller import package_versions
from tests.e2e.bandit import BITS, NUM_ESTIMATES, Bandit
from verl.config.algorithm import RolloutCorrectionConfig

NO_LIMIT = 1e3
BAND = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
CORRECTIONS: dict[str, RolloutCorrectionConfig | None] = {
    "exact gradient": None,
    "no correction": RolloutCorrectionConfig(rollout_is=None),
    "token weights": RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=NO_LIMIT),
    "sequence weights": RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_threshold=NO_LIMIT
    ),
    "sequence weights up to 2": RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_threshold=2.0
    ),
    "rejection outside 0.5 to 2": RolloutCorrectionConfig(rollout_is=None, **BAND),
    "both": RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=NO_LIMIT, **BAND),
    "bypass, clipped": RolloutCorrectionConfig.bypass_ppo_clip(),
}


def measure(num_steps: int) -> dict[str, dict[str, object]]:
    """Of each correction: the share of the policy gradient, its standard error, and the curve."""
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        game = Bandit(folder)
        try:
            for name, correction in CORRECTIONS.items():
                curve = [round(x, 4) for x in game.learn(correction, num_steps=num_steps)]
                results[name] = {"expected_reward": curve}
                if correction is not None:
                    shares = game.estimates(correction)
                    error = float(shares.std()) / NUM_ESTIMATES**0.5
                    results[name] |= {
                        "share": round(float(shares.mean()), 3),
                        "standard_error": round(error, 3),
                    }
                print(name, results[name], flush=True)
        finally:
            game.process.close()
    return results


def draw(results: dict[str, dict[str, object]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, found in results.items():
        is_exact = name == "exact gradient"
        style = {"color": "black", "linestyle": ":", "linewidth": 2.5} if is_exact else {}
        axes.plot(found["expected_reward"], label=name, **style)
    axes.set(xlabel="optimizer step", ylabel="expected reward, exact", ylim=(0, 1))
    axes.locator_params(axis="x", integer=True)
    axes.set_title(f"The engine generates with weights rounded to {BITS} bits")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    results = measure(options.steps)
    report = {"bits": BITS, "results": results, "versions": package_versions()}
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    if options.picture is not None:
        draw(results, options.picture)


if __name__ == "__main__":
    main()
