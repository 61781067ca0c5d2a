"""The process and its environment: every variable the package reads, and its exit codes.

Each is a function rather than a constant, so that a test or a launcher may set the variable after
the import. Torch-style rank variables (`RANK`, `WORLD_SIZE`, ...) are read here too.

Exit codes are the other thing a process shares with its scheduler (sysexits.h): 65 is data that no
run can start with, 70 a run that failed by itself. A command that catches `EndsTheRun` prints the
message without a traceback and exits with its code.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_OWN_VARIABLES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "DIST_INIT_METHOD"),
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VERL_USE_EXTERNAL_MODULES"),
    *("WG_BACKEND", "DISABLE_WORKER_INIT"),
}
_SECRET_ENDINGS = ("_TOKEN", "_KEY", "_KEY_ID", "_CREDENTIALS")


def external_modules() -> list[str]:
    """`VERL_USE_EXTERNAL_MODULES=a,b`: modules that `import verl` loads, to register extensions."""
    return [
        name.strip() for name in variable("VERL_USE_EXTERNAL_MODULES").split(",") if name.strip()
    ]


def logging_level() -> str:
    """`VERL_LOGGING_LEVEL`, default WARN."""
    return variable("VERL_LOGGING_LEVEL", "WARN")


def sft_logging_level() -> str:
    """`VERL_SFT_LOGGING_LEVEL`, default what all of verl has."""
    return variable("VERL_SFT_LOGGING_LEVEL") or logging_level()


def auto_padding() -> bool:
    """`VERL_AUTO_PADDING=TRUE|1`: batches are padded to a divisible length where they are split."""
    return variable("VERL_AUTO_PADDING").upper() in ("TRUE", "1")


def forced_device() -> str:
    """`VERL_FORCE_DEVICE=cuda|npu|cpu`: the device type to use, whatever the machine has."""
    return variable("VERL_FORCE_DEVICE").lower()


def run_id() -> str:
    """`VERL_RUN_ID`: set by the driver of a run on Ray, part of the names of what it reserves."""
    return variable("VERL_RUN_ID")


def use_modelscope() -> bool:
    """`VERL_USE_MODELSCOPE=True|1`: model names are looked up on ModelScope, not on the HF hub."""
    return variable("VERL_USE_MODELSCOPE").upper() in ("TRUE", "1")


def dist_init_method() -> str | None:
    """`DIST_INIT_METHOD=tcp://host:port|file://path`: where process groups meet; unset means at
    `MASTER_ADDR`."""
    return variable("DIST_INIT_METHOD") or None


def has_agent_store() -> bool:
    """`TORCHELASTIC_USE_AGENT_STORE=True`: torchrun holds the store in which its ranks meet."""
    return variable("TORCHELASTIC_USE_AGENT_STORE") == "True"


def rank() -> int:
    return int(variable("RANK", "0"))


def local_rank() -> int:
    return int(variable("LOCAL_RANK", "0"))


def world_size() -> int:
    return int(variable("WORLD_SIZE", "1"))


def is_ray_worker() -> bool:
    """`WG_BACKEND=ray`: this process is a rank of a worker group on Ray."""
    return variable("WG_BACKEND") == "ray"


def is_inside_colocated_worker() -> bool:
    """`DISABLE_WORKER_INIT=1`: the outer worker of this process has set up its environment."""
    return variable("DISABLE_WORKER_INIT") == "1"


def ray_leaves_devices_visible() -> bool:
    """`RAY_EXPERIMENTAL_NOSET_*_VISIBLE_DEVICES=1`: workers see all devices, not only their own."""
    return any(
        name.startswith("RAY_EXPERIMENTAL_NOSET_") and value not in ("", "0")
        for name, value in os.environ.items()
    )


def vllm_python() -> str | None:
    """`VERL_VLLM_PYTHON`: an interpreter whose environment has vLLM, for tests that start it."""
    return variable("VERL_VLLM_PYTHON") or None


def triton_is_interpreted() -> bool:
    """`TRITON_INTERPRET=1`: Triton runs its kernels as Python on a CPU, to test them."""
    return variable("TRITON_INTERPRET") == "1"


def sglang_python() -> str | None:
    """`VERL_SGLANG_PYTHON`: the interpreter of SGLang's environment, for its tests."""
    return variable("VERL_SGLANG_PYTHON") or None


def is_set(name: str) -> bool:
    return name in os.environ


def file_logger_path() -> str | None:
    """`VERL_FILE_LOGGER_PATH`: the file of the `file` tracker; unset means one under the root."""
    return variable("VERL_FILE_LOGGER_PATH") or None


def file_logger_root() -> str:
    """`VERL_FILE_LOGGER_ROOT`, default `.`: `<root>/<project>/<experiment>.jsonl`."""
    return variable("VERL_FILE_LOGGER_ROOT") or "."


def tensorboard_dir() -> str | None:
    """`TENSORBOARD_DIR`: where the `tensorboard` tracker writes its event files."""
    return variable("TENSORBOARD_DIR") or None


def cache_folder() -> Path:
    """`VERL_CACHE`, default `verl` in `XDG_CACHE_HOME` (`~/.cache`): copies of remote files."""
    general = variable("XDG_CACHE_HOME") or "~/.cache"
    return Path(variable("VERL_CACHE") or f"{general}/verl").expanduser()


def mlflow_tracking_uri() -> str:
    """`MLFLOW_TRACKING_URI`, default a SQLite file in the cache folder, which is then created."""
    if variable("MLFLOW_TRACKING_URI"):
        return variable("MLFLOW_TRACKING_URI")
    cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    return f"sqlite:///{cache_folder().absolute()}/mlruns.db"


def server_token() -> str | None:
    """`VERL_SERVER_TOKEN`: what clients of a model server show; unset, it makes one."""
    return variable("VERL_SERVER_TOKEN") or None


def ray_job_config() -> str:
    """`RAY_JOB_CONFIG_JSON_ENV_VAR`: what `ray job submit` was given, as JSON; "" outside a job."""
    return variable("RAY_JOB_CONFIG_JSON_ENV_VAR")


def ray_address() -> str | None:
    """`RAY_ADDRESS`: the cluster that `ray.init` joins; unset, it starts one."""
    return variable("RAY_ADDRESS") or None


def variables_of_verl() -> dict[str, str]:
    """All `VERL_*` variables but secrets, for a process elsewhere that is to behave as this one."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("VERL_") and not _is_secret(name)
    }


def scrubbed_environment() -> dict[str, str]:
    """All variables but those that belong to this process or are secrets, for one that it starts.

    Gone are its place among ranks, its import path and environment, Ray's and the extensions' own,
    and whatever is named like a key, a token or a password.
    """
    return {name: value for name, value in os.environ.items() if not _is_private(name)}


def _is_private(name: str) -> bool:
    is_own = name in _OWN_VARIABLES or name.startswith(("RAY_", "TORCHELASTIC_"))
    return is_own or _is_secret(name)


def _is_secret(name: str) -> bool:
    return name.endswith(_SECRET_ENDINGS) or "SECRET" in name or "PASSWORD" in name


def volcengine_capacity_expiration() -> int | None:
    """`MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP`: when the instance ends, Unix seconds."""
    return _timestamp("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP")


def sagemaker_capacity_expiration() -> int | None:
    """`SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP`, in Unix seconds."""
    return _timestamp("SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP")


def _timestamp(name: str) -> int | None:
    text = variable(name)
    if not text:
        return None
    if not text.isdigit():
        raise ValueError(f"{name} is {text!r}; it must be a time in whole seconds since 1970")
    return int(text) or None


def variable(name: str, default: str = "") -> str:
    return os.environ.get(name, default)


def all_variables() -> dict[str, str]:
    return dict(os.environ)


def replace_variables(variables: Mapping[str, str]) -> None:
    """Make these the whole environment."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def set_variable(name: str, value: str) -> None:
    os.environ[name] = value


def remove_variable(name: str) -> None:
    os.environ.pop(name, None)


@contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """Set a variable for the length of a `with` block, then restore or remove it."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


class EndsTheRun(Exception):
    """Mixin of errors that end a command with an exit code of their own."""

    exit_code: int = 1


class BadData(EndsTheRun):
    exit_code = 65


class WentWrong(EndsTheRun):
    exit_code = 70
