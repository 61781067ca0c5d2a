"""The environment of every process that a training run starts on Ray."""

import json
from typing import Any

from verl.utils.environment import is_set, ray_job_config

PPO_RAY_RUNTIME_ENV: dict[str, Any] = {
    "env_vars": {
        "TOKENIZERS_PARALLELISM": "true",
        "NCCL_DEBUG": "WARN",
        "VLLM_LOGGING_LEVEL": "WARN",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # vLLM's sleep mode cannot release memory that NCCL holds in cuMem.
        "NCCL_CUMEM_ENABLE": "0",
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
        "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    },
}


def get_ppo_ray_runtime_env() -> dict[str, Any]:
    """A runtime environment for `ray.init`, made anew at each call.

    A variable that this process has already is left to the user's value, which Ray hands on. The
    working folder is not shipped (`working_dir` is None), except in a job that was submitted with
    one, where the job's is kept.
    """
    missing = {
        name: value for name, value in PPO_RAY_RUNTIME_ENV["env_vars"].items() if not is_set(name)
    }
    runtime_env: dict[str, Any] = {"env_vars": missing}
    if not _job_has_working_dir():
        runtime_env["working_dir"] = None
    return runtime_env


def _job_has_working_dir() -> bool:
    submitted = json.loads(ray_job_config() or "{}")
    return (submitted.get("runtime_env") or {}).get("working_dir") is not None
