import json
from pathlib import Path

import yaml

import verl.trainer.constants_ppo as constants
from verl.trainer.constants_ppo import PPO_RAY_RUNTIME_ENV, get_ppo_ray_runtime_env


def test_variables_the_user_has_set_are_left_alone(monkeypatch):
    for name in PPO_RAY_RUNTIME_ENV["env_vars"]:
        monkeypatch.delenv(name, raising=False)
    assert get_ppo_ray_runtime_env()["env_vars"] == PPO_RAY_RUNTIME_ENV["env_vars"]
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "")
    changed = get_ppo_ray_runtime_env()["env_vars"]
    missing = {"NCCL_DEBUG", "VLLM_LOGGING_LEVEL"}
    assert set(PPO_RAY_RUNTIME_ENV["env_vars"]) - set(changed) == missing


def test_each_call_gives_a_dictionary_of_its_own():
    get_ppo_ray_runtime_env()["env_vars"]["NEW"] = "1"
    assert "NEW" not in get_ppo_ray_runtime_env()["env_vars"]
    assert "NEW" not in PPO_RAY_RUNTIME_ENV["env_vars"]


def test_the_working_folder_is_that_of_the_submitted_job_or_not_shipped(monkeypatch):
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert get_ppo_ray_runtime_env()["working_dir"] is None
    job = {"runtime_env": {"working_dir": "gcs://code.zip"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    assert "working_dir" not in get_ppo_ray_runtime_env()
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {}}))
    assert get_ppo_ray_runtime_env()["working_dir"] is None


def test_the_yaml_for_submitted_jobs_sets_the_same_variables():
    text = Path(constants.__file__).with_name("runtime_env.yaml").read_text()
    assert yaml.safe_load(text)["env_vars"] == PPO_RAY_RUNTIME_ENV["env_vars"]
