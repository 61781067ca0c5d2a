"""What an import must not load, seen from a fresh interpreter."""

import json
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import verl
from verl.agent_loop.single_turn import SingleTurnAgentLoop
from verl.config.base import BaseConfig
from verl.config.convert import load_target
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.old_paths import OLD_PATHS, OldPaths

PROGRAM = """
import gc, importlib, json, sys
gc.disable()
for module in sys.argv[1:]:
    importlib.import_module(module)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded_by(*modules: str) -> set[str]:
    """The top-level packages in memory after these imports."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *modules],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_the_configuration_loads_none_of_the_heavy_packages():
    heavy = {"torch", "transformers", "tensordict", "numpy", "ray", "pandas", "pyarrow"}
    assert not heavy & loaded_by("verl", "verl.config")


def test_training_code_loads_no_cluster_and_no_foreign_engine():
    loaded = loaded_by(
        "verl",
        "verl.config",
        "verl.single_controller",
        "verl.single_controller.local",
        "verl.single_controller.controllers",
        "verl.utils.ray_utils",
        "verl.utils.resource_pool_manager",
        "verl.trainer.ppo.core_algos",
        "verl.trainer.ppo.metric_utils",
        "verl.trainer.ppo.reward",
        "verl.trainer.ppo.utils",
        "verl.utils.tracking",
        "verl.utils.profiler",
        "verl.utils.rollout_trace",
        "verl.trainer.ppo.trainer",
        "verl.trainer.task_runner",
        "verl.agent_loop",
        "verl.workers.reward_manager",
        *(path for path in OLD_PATHS if ".ray." not in path),  # names are looked up when used
    )
    assert "torch" in loaded
    optional = {"ray", "vllm", "sglang", "megatron", "wandb", "mlflow", "tensorboard", "torchdata"}
    assert not optional & loaded


def test_no_file_stands_behind_an_older_path():
    root = Path(verl.__file__).parent.parent
    paths = [root.joinpath(*name.split(".")) for name in OLD_PATHS]
    assert not [p for p in paths if p.with_suffix(".py").exists() or (p / "__init__.py").exists()]


def test_a_folder_left_behind_does_not_hide_an_older_path():
    name = next(name for name, entry in OLD_PATHS.items() if isinstance(entry, str))
    assert OldPaths().find_spec(name, None) is not None
    kinds = [type(finder) for finder in sys.meta_path]
    assert kinds.index(OldPaths) < sys.meta_path.index(PathFinder)


def test_a_class_is_found_by_the_full_name_of_an_older_path():
    old = "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop"
    assert load_class_from_fqn(old) is SingleTurnAgentLoop
    assert load_target("verl.base_config.BaseConfig") is BaseConfig


def test_a_command_with_an_older_path_runs():
    module = "verl.experimental.one_step_off_policy.main_ppo"
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"python -m {module}" in done.stdout
    assert "one_step_off_ppo_trainer" in done.stdout
