"""The options in examples/lora and docs/lora.md are real, and the numbers are those measured."""

import json
import re
import subprocess
from pathlib import Path

from omegaconf import OmegaConf

from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.schema import Keys

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "lora"
SECTIONS = "algorithm|actor_rollout_ref|critic|data|trainer|custom_reward_function"
SETTING = re.compile(rf"\b((?:{SECTIONS})\.[\w.]+)=('[^']*'|\S+)")


def test_the_command_is_one_that_the_trainer_takes():
    script = EXAMPLE / "run.sh"
    assert subprocess.run(["sh", "-n", str(script)], timeout=60, check=False).returncode == 0
    settings = [
        f"{key}={value.strip(chr(39))}" for key, value in SETTING.findall(script.read_text())
    ]
    assert len(settings) > 25
    config = load_config(OmegaConf.from_dotlist(settings), PPOConfig).config
    model = config.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (8, 16, "all-linear")
    assert config.actor_rollout_ref.actor.use_kl_loss


def test_every_option_on_the_pages_exists():
    keys = Keys(PPOConfig())
    for page in (ROOT / "docs" / "lora.md", EXAMPLE / "README.md"):
        named = re.findall(rf"\b((?:{SECTIONS})\.[a-z_]\w*(?:\.\w+)+)", page.read_text())
        named = [key for key in named if ".peft" not in key]
        assert len(named) > 2
        assert [key for key in named if key not in keys] == []


def test_the_table_shows_the_measured_run():
    run = json.loads((EXAMPLE / "results" / "seed_0.json").read_text())
    page = (EXAMPLE / "README.md").read_text()
    reward = {step["step"]: step for step in run["training"]}
    for point in run["validation"]:
        row = f"| {point['step']} | {point['accuracy']:.0%} | {point['worked_out']:.0%} |"
        if point["step"] not in (0, 20):
            step = reward[point["step"]]
            row += f" {step['reward']:.2f} | {step['kl']:.3f} |"
        assert row in page or point["step"] == 20, row
    for number in (run["parameters"], run["trained_parameters"]):
        assert f"{number:,}" in page
