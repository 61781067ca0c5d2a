"""The process and its environment: every variable the package reads, and its exit codes.

Each is a function rather than a constant, so that a test or a launcher may set the variable after
the import. Torch-style rank variables (`RANK`, `WORLD_SIZE`, ...) are read here too.

Exit codes are the other thing a process shares with its scheduler (sysexits.h): 2 is a mistake in
what the user wrote, 65 data that no run can start with, 70 a run that failed by itself. A command
that catches `EndsTheRun` prints the message without a traceback and exits with its code.

OpenMP reads its variables when torch is loaded, so `choose_openmp` sets them before. Threads that
wait for each other spin by default, for milliseconds: the fastest way on a quiet machine; beside
other busy processes the kernel takes a processor from one thread while the others spin for it, and
a step takes many times as long. So threads sleep while they wait where processors are in demand,
and spin briefly elsewhere. How threads wait changes no number. How many there are may, so that
follows from the machine (the CPU quota of a container), never from its load.
"""

import errno
import logging
import math
import os
import resource
import sys
import time
import traceback
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


class QuietBesideOthers(logging.StreamHandler):
    """Shows verl's log lines on stderr where the program has set up no logging of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            super().emit(record)


def set_up_logging() -> None:
    """Give verl's loggers the level of `VERL_LOGGING_LEVEL`, in this process."""
    logger = logging.getLogger("verl")
    logger.setLevel(logging_level())
    if logger.level < logging.WARNING and not logger.handlers:
        logger.addHandler(QuietBesideOthers())


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


def is_torchrun() -> bool:
    """`TORCHELASTIC_RUN_ID`: this process is a rank that `torchrun` started."""
    return is_set("TORCHELASTIC_RUN_ID")


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
    """`VERL_FILE_LOGGER_ROOT`, default `logs`: `<root>/<project>/<experiment>.jsonl`.

    Not the working folder: a project's folder there would hide the package of the same name.
    """
    return variable("VERL_FILE_LOGGER_ROOT") or "logs"


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


def tool_server_token() -> str:
    """`VERL_TOOL_SERVER_TOKEN`: what is shown to `multi_turn.tool_server`; unset, nothing is."""
    return variable("VERL_TOOL_SERVER_TOKEN")


def retrieval_token() -> str:
    """`VERL_RETRIEVAL_TOKEN`: what is shown to the search tool's service; unset, nothing is."""
    return variable("VERL_RETRIEVAL_TOKEN")


def teacher_token() -> str:
    """`VERL_TEACHER_TOKEN`: what `distillation.serve` asks for, and is shown to the endpoint of a
    teacher; unset, the first makes one, and nothing is shown."""
    return variable("VERL_TEACHER_TOKEN")


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
    """None where it is not set, or is no number."""
    try:
        seconds = float(variable(name))
    except ValueError:
        return None
    return int(seconds) or None if math.isfinite(seconds) else None


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


class Misuse(EndsTheRun):
    exit_code = 2


class BadData(EndsTheRun):
    exit_code = 65


class WentWrong(EndsTheRun):
    exit_code = 70


class Refused(Misuse, ValueError):
    """What a run cannot be built from, in the words of the code that found it."""


@contextmanager
def refusing() -> Iterator[None]:
    """A `ValueError` that verl's own code raises here is a sentence for users; one from a library
    or from their own code is told with its traceback."""
    try:
        yield
    except ValueError as error:
        *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
        is_ours = frame.f_globals["__name__"].partition(".")[0] == "verl"
        if not is_ours or isinstance(error, EndsTheRun):
            raise
        raise Refused(str(error)) from error


def ending_of(error: BaseException) -> EndsTheRun | None:
    """The error whose message is enough: this one, or the one that a worker raised."""
    return next((one for one in (error, error.__cause__) if isinstance(one, EndsTheRun)), None)


# ---- memory --------------------------------------------------------------------------------------

LEAST_ADDRESS_SPACE = 1536 << 20
"""What the libraries of a run map at least: a two-layer model trains on a CPU in 1.8 GB."""

OUT_OF_MEMORY = (
    *("Cannot allocate memory", "failed to map segment", "not enough memory", "bad_alloc"),
    *("can't start new thread", "can't allocate memory", "error return without exception set"),
)
"""How libraries say it that could not get memory for a file, a tensor or a stack."""


def address_space() -> int | None:
    """Bytes that this process may map (RLIMIT_AS, `ulimit -v`); None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def require_address_space() -> None:
    """Raise MemoryError where the libraries of a run cannot be loaded: without memory some of them
    wait for ever, crash, or fail with errors that do not name it."""
    limit = address_space()
    if limit is not None and limit < LEAST_ADDRESS_SPACE:
        raise MemoryError(
            f"this process may map {limit >> 20} MiB of memory (RLIMIT_AS, `ulimit -v`), and the "
            f"libraries of a run need {LEAST_ADDRESS_SPACE >> 20} MiB: raise the limit, or limit "
            "the memory that is used (a control group) instead"
        )


def memory_hint(error: BaseException) -> str | None:
    """A sentence about memory, if the lack of it has led to an error that may not say so."""
    cause: BaseException | None = error
    while cause is not None:
        is_plain = isinstance(cause, MemoryError) or (
            isinstance(cause, OSError) and cause.errno == errno.ENOMEM
        )
        if is_plain or any(text in str(cause) for text in OUT_OF_MEMORY):
            limit = address_space()
            may = "" if limit is None else f"; it may map {limit >> 20} MiB (`ulimit -v`)"
            return f"this process got no more memory{may}. {type(cause).__name__}: {cause}"
        cause = cause.__cause__ or cause.__context__
    return None


# ---- processors ----------------------------------------------------------------------------------

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
QUIET_SPINS = 10_000
"""About half a millisecond: more than most gaps between two operations, less than a time slice."""

LOOK_SECONDS = 0.2
_chosen: set[str] = set()
SPARE_CORES = 0.5
"""What others may use before the machine counts as busy."""


def choose_openmp() -> list[str]:
    """Set what the user has not; a line about each choice that is worth knowing."""
    notices: list[str] = []
    if not is_set("OMP_NUM_THREADS") and usable_cores() < len(allowed_cores()):
        set_variable("OMP_NUM_THREADS", str(usable_cores()))
        _chosen.add("OMP_NUM_THREADS")
        notices.append(
            f"threads: {usable_cores()}, because the container may use {cpu_quota():g} of "
            f"{len(allowed_cores())} processors (OMP_NUM_THREADS sets another number)"
        )
    if not any(map(is_set, WAITING)):
        demand = demand_of_others()
        if demand is None:
            set_variable("GOMP_SPINCOUNT", str(QUIET_SPINS))
        else:
            set_variable("OMP_WAIT_POLICY", "PASSIVE")
            when = " in processes that start now" if "torch" in sys.modules else ""
            notices.append(
                f"threads sleep while they wait{when}, because {demand} "
                "(OMP_WAIT_POLICY=ACTIVE lets them spin)"
            )
    return notices


def has_chosen_threads() -> bool:
    """Whether the user says how many threads a process has."""
    return is_set("OMP_NUM_THREADS") and "OMP_NUM_THREADS" not in _chosen


def usable_cores() -> int:
    """Processors for the threads of this process, or for those of all its ranks."""
    quota = cpu_quota()
    allowed = len(allowed_cores())
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def demand_of_others() -> str | None:
    """Why threads of ours would wait for processors, in words; None on a quiet machine."""
    cores = allowed_cores()
    before, start = busy_seconds(cores), time.monotonic()
    load = os.getloadavg()[0]
    if load > len(cores) + SPARE_CORES:  # more than a run of ours that has just ended
        return f"the load is {load:.1f} on {len(cores)} processors"
    if before is None:
        return None
    time.sleep(LOOK_SECONDS)
    after = busy_seconds(cores) or before
    used = (after - before) / (time.monotonic() - start)
    if used > SPARE_CORES:
        return f"other processes use {used:.1f} of {len(cores)} processors"
    return None


def allowed_cores() -> set[int]:
    """The processors that this process may run on."""
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def busy_seconds(cores: set[int], stat: Path = Path("/proc/stat")) -> float | None:
    """What these processors have worked since the machine started; None where nobody counts."""
    if not stat.exists():
        return None
    ticks = 0
    for line in stat.read_text().splitlines():
        name, *counts = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _io, interrupts, soft, stolen = map(int, counts[:8])
            ticks += user + nice + system + interrupts + soft + stolen
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_quota(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> float | None:
    """How many processors' time the control groups of this process allow; None for no limit."""
    limits: list[float] = []
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for folder in _with_parents(root, path):
                limits += _quota(folder / "cpu.max")
        elif "cpu" in controllers.split(","):
            for folder in _with_parents(root / controllers, path):
                limits += _quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
    return min(limits, default=None)


def _with_parents(root: Path, path: str) -> list[Path]:
    """The group's folder and those above it; in a container the group may be the root itself."""
    folder = root / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _quota(*files: Path) -> list[float]:
    words = [word for file in files if file.is_file() for word in file.read_text().split()]
    if len(words) == 2 and words[0].isdigit():  # "max" and -1 mean none
        return [int(words[0]) / int(words[1])]
    return []
