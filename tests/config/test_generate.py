"""The YAML files and the reference page say what the dataclasses say, and Hydra composes them."""

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError

from verl.config import ROOTS, BaseConfig
from verl.config.base import is_option
from verl.config.convert import Conversion
from verl.config.generate import PAGE, REPOSITORY, YAML_FOLDER, main, stale_files, write_files
from verl.config.yaml_files import FILES, HEADER, sentences

PUBLIC_FILES = """
ppo_trainer ppo_megatron_trainer sft_trainer sft_trainer_engine rm_trainer generation evaluation
reward_manager actor/actor critic/critic ref/ref profiler/profiler
actor/dp_actor actor/megatron_actor data/legacy_data ref/dp_ref ref/megatron_ref rollout/rollout
model/hf_model critic/dp_critic critic/megatron_critic reward_model/dp_reward_loop
reward_model/megatron_reward_loop reward_model/dp_reward_model reward_model/megatron_reward_model
reward_model/reward_model algorithm/rollout_correction optim/fsdp optim/megatron optim/veomni
engine/fsdp engine/megatron engine/veomni
"""


SURFACE = json.loads((Path(__file__).parent / "surface_keys.json").read_text())


def composed(name: str, *overrides: str, folder: Path = REPOSITORY / YAML_FOLDER) -> DictConfig:
    with initialize_config_dir(str(folder), version_base=None):
        return compose(name, overrides=list(overrides))


def resolved(config: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return without_targets(values)


def without_targets(tree: dict[Any, Any]) -> dict[str, Any]:
    return {
        name: without_targets(value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if name != "_target_"
    }


def options(section: BaseConfig) -> dict[str, Any]:
    """The defaults below a section, without what only workers fill in."""
    values = {}
    for item in filter(is_option, fields(section)):
        value, written = vars(section)[item.name], item.metadata.get("yaml")
        value = value if isinstance(written, str | None) else written
        values[item.name] = options(value) if isinstance(value, BaseConfig) else value
    return values


def test_the_generated_files_are_current():
    assert stale_files(REPOSITORY) == []
    assert main(["--check"]) == 0


def test_the_public_files_exist():
    assert sorted(FILES) == sorted(PUBLIC_FILES.split())
    for name in FILES:
        assert (REPOSITORY / YAML_FOLDER / f"{name}.yaml").read_text().startswith(HEADER)


def test_a_changed_a_missing_and_a_left_over_file_are_stale(tmp_path: Path):
    write_files(tmp_path)
    assert stale_files(tmp_path) == []
    changed, missing = YAML_FOLDER / "optim/fsdp.yaml", YAML_FOLDER / "generation.yaml"
    left_over = YAML_FOLDER / "actor/old_actor.yaml"
    text = (tmp_path / changed).read_text()
    (tmp_path / changed).write_text(text.replace("lr: 0.001", "lr: 0.002"))
    (tmp_path / missing).unlink()
    shutil.copy(tmp_path / changed, tmp_path / left_over)
    (tmp_path / YAML_FOLDER / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    assert set(stale_files(tmp_path)) == {changed, missing, left_over}
    write_files(tmp_path)
    assert stale_files(tmp_path) == []
    assert (tmp_path / changed).read_text() == text
    assert not (tmp_path / left_over).exists()
    assert (tmp_path / YAML_FOLDER / "mine.yaml").exists()


@pytest.mark.parametrize("name", ROOTS)
def test_composing_a_file_gives_the_defaults_of_its_dataclass(name: str):
    assert resolved(composed(name)) == options(ROOTS[name]())


@pytest.mark.parametrize("name", ROOTS)
def test_a_composed_file_converts_to_its_dataclass(name: str):
    conversion = Conversion()
    values = OmegaConf.to_container(composed(name), resolve=True)
    config = conversion.section(ROOTS[name], values)  # pyright: ignore[reportArgumentType]
    assert conversion.faults == []
    assert conversion.unknown == []
    assert options(config) == options(ROOTS[name]())


def test_defaults_follow_the_option_that_the_user_sets():
    config = composed(
        "ppo_trainer",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.clip_ratio=0.3",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4",
        "actor_rollout_ref.actor.grad_clip=0.5",
        "actor_rollout_ref.rollout.n=5",
        "data.train_batch_size=64",
        "reward_model.reward_manager=dapo",
        "trainer.project_name=mine",
    )
    three = config.actor_rollout_ref
    assert config.critic.model.path == "Qwen/Qwen2.5-0.5B"
    assert three.rollout.log_prob_micro_batch_size_per_gpu == 2
    assert three.ref.log_prob_micro_batch_size_per_gpu == 2
    assert three.actor.ppo_infer_micro_batch_size_per_gpu == 2
    assert config.critic.ppo_micro_batch_size_per_gpu == 2
    assert config.critic.forward_micro_batch_size_per_gpu == 2
    assert (three.actor.clip_ratio_low, three.actor.clip_ratio_high) == (0.3, 0.3)
    assert three.actor.fsdp_config.ulysses_sequence_parallel_size == 4
    assert three.ref.fsdp_config.ulysses_sequence_parallel_size == 4
    assert three.actor.optim.clip_grad == 0.5
    assert (three.actor.rollout_n, three.ref.rollout_n, config.critic.rollout_n) == (5, 5, 5)
    assert config.data.gen_batch_size == 64
    assert config.reward_manager.name == "dapo"
    assert config.trainer.default_local_dir == "checkpoints/mine/default"


def test_the_megatron_reference_is_laid_out_like_the_actor():
    config = composed(
        "ppo_megatron_trainer", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4"
    )
    assert config.actor_rollout_ref.ref.megatron.tensor_model_parallel_size == 4
    assert config.critic.megatron.tensor_model_parallel_size == 1


@pytest.mark.parametrize(
    ("override", "engine", "optimizer"),
    [
        ("engine=megatron", "McoreEngineConfig", "FSDPOptimizerConfig"),
        ("engine=veomni", "VeOmniEngineConfig", "FSDPOptimizerConfig"),
        ("optim=megatron", "FSDPEngineConfig", "McoreOptimizerConfig"),
        ("optim=veomni", "FSDPEngineConfig", "VeOmniOptimizerConfig"),
    ],
)
def test_the_sft_engine_and_optimizer_are_chosen_by_group(
    override: str, engine: str, optimizer: str
):
    config = composed("sft_trainer_engine", override)
    assert config.engine._target_ == f"verl.workers.config.{engine}"
    assert config.optim._target_ == f"verl.workers.config.{optimizer}"
    assert config.optim.lr == 1e-3
    if override.startswith("engine"):
        with pytest.raises(ConfigAttributeError):
            _ = config.engine.wrap_policy


def test_component_groups_are_chosen_by_name():
    config = composed(
        "ppo_trainer",
        "critic=megatron_critic",
        "reward_model=dp_reward_model",
        "ref@actor_rollout_ref.ref=megatron_ref",
    )
    assert config.critic._target_ == "verl.workers.config.McoreCriticConfig"
    assert config.critic.optim.lr == 1e-5
    assert config.reward_model.use_reward_loop
    assert config.actor_rollout_ref.ref.megatron.forward_only


def test_a_users_own_file_composes_from_the_root_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_run.yaml").write_text(
        "hydra:\n  searchpath: [file://verl/trainer/config]\n"
        "defaults: [ppo_trainer, _self_]\n"
        "data:\n  train_batch_size: 256\n"
        "my_section:\n  depth: 3\n"
    )
    monkeypatch.chdir(REPOSITORY)
    config = composed("my_run", "actor_rollout_ref.rollout.n=4", folder=tmp_path)
    assert config.data.train_batch_size == 256
    assert config.data.max_prompt_length == 512
    assert config.actor_rollout_ref.actor.rollout_n == 4
    assert config.my_section.depth == 3


def test_hydra_refuses_a_key_that_does_not_exist():
    with pytest.raises(Exception, match="ppo_minibatch_size"):
        composed("ppo_trainer", "actor_rollout_ref.actor.ppo_minibatch_size=64")
    added = composed("ppo_trainer", "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4")
    assert added.actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space == 4


@pytest.mark.parametrize(
    "name", ["optim/fsdp", "data/legacy_data", "rollout/rollout", "generation"]
)
def test_the_comment_above_a_key_is_its_sentence_word_for_word(name: str):
    section = FILES[name].section()
    written = comments_by_key((REPOSITORY / YAML_FOLDER / f"{name}.yaml").read_text())
    documented = sentences(type(section))
    for item in filter(is_option, fields(section)):
        assert written[item.name] == documented[item.name]


def comments_by_key(text: str) -> dict[str, str]:
    """What stands above each key of the top level, with wrapped lines joined."""
    found, block = {}, []
    for line in text.splitlines():
        if line.startswith("# "):
            block.append(line.removeprefix("# "))
        elif line and not line.startswith(" "):
            found[line.partition(":")[0]] = " ".join(block)
            block = []
        else:
            block = []
    return found


def test_a_row_of_the_page_has_type_default_rule_and_meaning():
    rows = (REPOSITORY / PAGE).read_text().splitlines()
    assert (
        "| `ppo_mini_batch_size` | int | `256` | ≥ 1 | Prompts per optimizer step, over all "
        "devices; times `rollout.n` gives sequences. |"
    ) in rows
    assert (
        "| `clip_ratio_low` | float | `0.2`, follows `clip_ratio` | ≥ 0 | "
        "Clip below 1; follows `clip_ratio`. |"
    ) in rows


@pytest.mark.parametrize("name", ["ppo_trainer", "sft_trainer", "evaluation"])
def test_the_page_lists_every_key_of_a_command(name: str):
    page = (REPOSITORY / PAGE).read_text()
    chapter = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    listed = set()
    for part in chapter.split("\n### ")[1:]:
        path = part.partition("\n")[0].strip("`")
        way = "" if path == "Top level" else f"{path}."
        listed |= {way + key for key in re.findall(r"^\| `([^`]+)` \|", part, flags=re.MULTILINE)}
    for key in SURFACE[name]:
        parts = key.split(".")
        assert any(".".join(parts[:end]) in listed for end in range(1, len(parts) + 1)), key


def test_every_link_of_the_page_has_a_heading():
    page = (REPOSITORY / PAGE).read_text()
    headings = re.findall(r"^#+ (.+)$", page, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= anchors
