"""The recipes and losses that learn the toy, with their settings."""

from pathlib import Path

from tests.toy import ACTOR, ROLLOUT, recipe_run, toy_run

LOSS = f"{ACTOR}.policy_loss"
GROUPS = ("algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=false")
TWICE = f"{ACTOR}.ppo_epochs=2"
RUNS = {
    "online_dpo": (),
    "spin": (),
    "sppo": (f"{ACTOR}.sppo_eta=8.0",),
    "gvpo": (*GROUPS, f"{LOSS}.loss_mode=gvpo"),
    "dppo_tv": (f"{LOSS}.loss_mode=dppo_tv", TWICE),
    "dppo_kl": (f"{LOSS}.loss_mode=dppo_kl", f"{ACTOR}.clip_ratio=0.05", TWICE),
    "dro": (f"{LOSS}.loss_mode=dro", f"{LOSS}.dro_beta=0.05"),
    "gdpo": ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[sevens,whole]"),
    "token-sum": (f"{ACTOR}.loss_agg_mode=token-sum",),
}
RECIPES = ("online_dpo", "spin", "sppo")
COMMON = (
    f"{ROLLOUT}.n=8",
    "data.train_batch_size=8",
    f"{ACTOR}.ppo_mini_batch_size=8",
    "trainer.total_training_steps=20",
)
PARTS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    letters = solution_str.replace(" ", "")
    sevens = sum(letter == ground_truth for letter in letters) / 8
    return {"score": sevens, "sevens": sevens, "whole": 0.01 * (len(letters) >= 8)}
"""
NOISE = """
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    letters = solution_str.replace(" ", "")
    sevens = sum(letter == ground_truth for letter in letters) / 8
    return {"score": zlib.crc32(solution_str.encode()) % 9 / 8, "sevens": sevens}
"""


def learn(
    toy: Path, output: Path, name: str, *changes: str, metric: str = "critic/score/mean"
) -> list[float]:
    """The score of every step."""
    settings = [*COMMON, *RUNS[name]]
    if name == "gdpo":
        output.mkdir(exist_ok=True)
        (output / "parts.py").write_text(PARTS)
        settings.append(f"custom_reward_function.path={output / 'parts.py'}")
    named = (name,) if name in RECIPES else ()
    run = recipe_run if name in RECIPES else toy_run
    metrics, trainer = run(toy, output, *named, *settings, *changes)
    assert not trainer.tripwires.counts.keys() & {"ratio_not_one", "non_finite"}
    return [step[metric] for step in metrics]
