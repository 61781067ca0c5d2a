"""The run: how long, on what, how often it saves, what a checkpoint holds, where it reports."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

from verl.config.async_training import V1Config
from verl.config.base import Absent, BaseConfig, When, never, option
from verl.config.roles import WITH_CRITIC, needs_reference

RESUME_MODES = ("auto", "disable", "resume_path")
DEVICES = ("auto", "cuda", "cpu", "npu")
LOCAL_DIR = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
CONTENTS = ["model", "optimizer", "extra"]
CHOICES = (*CONTENTS, "hf_model")


@dataclass(kw_only=True)
class TrainerConfig(BaseConfig):
    """One RL run."""

    _mutable_fields: ClassVar[set[str]] = {"resume_mode", "resume_from_path"}

    total_epochs: int = option(
        1,
        minimum=0,
        used_if=When(
            lambda here, run: here.total_training_steps is None, "total_training_steps decides"
        ),
    )
    """Passes over the training data."""

    total_training_steps: int | None = option(None, minimum=0)
    """Training steps; null takes what `total_epochs` gives."""

    recipe: str | None = None
    """Recipe whose stages take the place of PPO's; its own command sets it."""

    ref_update_freq: int = option(
        1,
        minimum=0,
        used_if=(
            When(lambda here, run: here.recipe == "spin", "only trainer.recipe=spin uses it"),
            When(lambda here, run: needs_reference(run), "there is no reference"),
        ),
    )
    """Training steps after which the policy becomes the reference; 0 keeps the first one."""

    project_name: str = "verl"
    """Project under which the run is reported and saved."""

    experiment_name: str = "default"
    """Name of the run."""

    logger: list[str] = option(default_factory=lambda: ["console"])
    """Where metrics go: `console`, `wandb`, `tensorboard`, `mlflow`, `swanlab`, `clearml`,
    `trackio`, `file`, ..."""

    device: str = option("auto", choices=DEVICES)
    """Device to run on; `auto` takes a GPU or NPU if there is one."""

    controller: str = option("auto", choices=("auto", "local", "ray"))
    """Who runs the workers: this process (`local`) or Ray. `auto` is local for one device and Ray
    otherwise."""

    nnodes: int = option(1, minimum=1)
    """Machines."""

    n_gpus_per_node: int = option(8, minimum=1)
    """Devices per machine; on a CPU, worker processes."""

    max_restarts: int = option(3, minimum=0)
    """How often a run whose worker processes died or hang starts them anew, from its last
    checkpoint, before it gives up."""

    worker_timeout: float = option(3600.0, above=0)
    """Seconds that workers may take for one call (a phase of a step, a part of a generation); then
    they count as hanging and are started anew."""

    dry_run: bool = False
    """Check the configuration, print the plan (batch sizes, placement, memory) and stop."""

    save_freq: int = option(-1, minimum=-1)
    """Training steps between checkpoints; -1 saves none."""

    test_freq: int = option(-1, minimum=-1)
    """Training steps between validations, and one after the last; -1 makes none of these."""

    val_before_train: bool = True
    """Validate before the first step."""

    val_only: bool = False
    """Validate and stop."""

    log_val_generations: int = option(0, minimum=0)
    """Validation samples shown in the trackers."""

    board: bool = False
    """Record steps and samples beside the checkpoints, and serve them as a page on this machine
    while the run goes on; afterwards `python -m verl.board FOLDER` shows them."""

    board_megabytes: int = option(
        1024, minimum=1, used_if=When(lambda here, run: here.board, "board is off")
    )
    """Size of that record; beyond it the samples of the oldest steps are removed."""

    rollout_data_dir: str | None = None
    """Folder for all training responses, one JSON Lines file per step; null writes none."""

    validation_data_dir: str | None = None
    """Folder for all validation responses, one JSON Lines file per step; null writes none."""

    resume_mode: str = option("auto", choices=RESUME_MODES)
    """Continue from the newest checkpoint (`auto`), never (`disable`), or from `resume_from_path`
    (`resume_path`)."""

    resume_from_path: str | None = option(
        None,
        used_if=When(
            lambda here, run: here.resume_mode == "resume_path", "resume_mode is not resume_path"
        ),
    )
    """Checkpoint folder, `.../global_step_N`, to continue from."""

    resume_may_change: list[str] = option(
        default_factory=list,
        used_if=When(lambda here, run: here.resume_mode != "disable", "resume_mode is disable"),
    )
    """Differences from the checkpoint to accept: `code`, `weights`, `data`, patterns of options."""

    default_local_dir: str = option("checkpoints/verl/default", yaml=LOCAL_DIR)
    """Folder for checkpoints."""

    default_hdfs_dir: str | None = None
    """Remote folder to which checkpoints are copied."""

    del_local_ckpt_after_load: bool = option(
        False,
        absent=Absent(
            "checkpoints stay when they are loaded; max_actor_ckpt_to_keep bounds their number"
        ),
    )
    """Delete a checkpoint's files once they are loaded."""

    max_actor_ckpt_to_keep: int | None = option(None, minimum=0)
    """Newest checkpoints of the actor to keep; null or 0 keeps all."""

    max_critic_ckpt_to_keep: int | None = option(None, minimum=0, used_if=WITH_CRITIC)
    """Newest checkpoints of the critic to keep; null or 0 keeps all."""

    journal_steps_to_keep: int = option(
        50, minimum=0, used_if=When(lambda here, run: here.save_freq > 0, "nothing is saved")
    )
    """Steps before the newest checkpoint whose journal (replies of tools, users, environments) is
    kept, for replays; later ones always are."""

    remove_previous_ckpt_in_save: bool = False
    """Deprecated: the same as keeping one checkpoint."""

    esi_redundant_time: int = option(0, minimum=0)
    """Seconds of safety when a checkpoint must be saved before a rented instance expires."""

    critic_warmup: int = option(0, minimum=0, used_if=WITH_CRITIC)
    """Training steps in which only the critic is trained."""

    balance_batch: bool = option(True, used_if=never("every rank always gets about as many tokens"))
    """Accepted for older scripts; every rank always gets about as many tokens."""

    use_legacy_worker_impl: str = option(
        "auto", choices=("auto", "enable", "disable"), used_if=never("there is one kind of worker")
    )
    """Accepted for older scripts; there is one kind of worker."""

    ray_wait_register_center_timeout: int = option(
        300, minimum=0, used_if=never("workers register with nobody")
    )
    """Accepted for older scripts; has no effect."""

    use_v1: bool = True
    """Go by `trainer.v1`; off, training is synchronous unless the command is asynchronous."""

    v1: V1Config = option(default_factory=V1Config)
    """Synchronous or asynchronous training, as newer scripts choose it."""

    wandb_proxy: str | None = option(
        None, used_if=When(lambda here, run: "wandb" in here.logger, "logger has no wandb")
    )
    """HTTPS proxy for Weights & Biases only."""


@dataclass(kw_only=True)
class RayKwargsConfig(BaseConfig):
    """Ray, where it is used."""

    ray_init: dict[str, Any] = option(default_factory=lambda: {"num_cpus": None})
    """Keyword arguments of `ray.init`; a null `num_cpus` takes all. Inside a container with fewer
    cores than the machine, set it."""

    timeline_json_file: str | None = None
    """File for Ray's timeline of the run; null writes none."""


WITH_QUEUE = When(
    lambda here, run: run.transfer_queue.enable, "only transfer_queue.enable=True uses it"
)
IN_PACKAGE = When(
    lambda here, run: run.transfer_queue.enable and find_spec("transfer_queue") is not None,
    "only the package TransferQueue uses it, with transfer_queue.enable=True; without the package "
    "rows travel as objects of Ray, or stay in the process",
)


def _mooncake() -> dict[str, Any]:
    return {
        "auto_init": False,
        "metadata_server": "localhost:50123",
        "master_server_address": "localhost:50124",
        "local_hostname": "localhost",
        "protocol": "tcp",
        "global_segment_size": 4294967296,
        "local_buffer_size": 1073741824,
        "device_name": "",
    }


@dataclass(kw_only=True)
class SimpleStorageConfig(BaseConfig):
    """The store of the package itself."""

    total_storage_size: int = option(100000, minimum=1, used_if=WITH_QUEUE)
    """Entries the data plane has room for, whatever holds them; one more is refused."""

    num_data_storage_units: int = option(8, minimum=1, used_if=IN_PACKAGE)
    """Processes that hold the data."""


@dataclass(kw_only=True)
class QueueBackendConfig(BaseConfig):
    """Where the rows are."""

    storage_backend: str = option("SimpleStorage", used_if=IN_PACKAGE)
    """The kind of store."""

    SimpleStorage: SimpleStorageConfig = option(default_factory=SimpleStorageConfig)
    """The store of the package itself."""

    MooncakeStore: dict[str, Any] = option(default_factory=_mooncake, used_if=IN_PACKAGE)
    """Settings of the store Mooncake."""


@dataclass(kw_only=True)
class QueueMetricsConfig(BaseConfig):
    """What the store says about itself."""

    enabled: bool = option(False, used_if=IN_PACKAGE)
    """Serve its metrics."""

    port: int = option(0, minimum=0, used_if=IN_PACKAGE)
    """Port for them; 0 takes a free one."""


@dataclass(kw_only=True)
class TransferQueueConfig(BaseConfig):
    """Batches kept in a distributed store instead of passing through the controller."""

    enable: bool = False
    """Keep the columns of a step in a data plane: ranks fetch their rows, the controller has
    lengths and scalars. In one process rows are passed as they are; on Ray the package
    TransferQueue holds them where it is installed, else Ray's object store."""

    metrics: QueueMetricsConfig = option(default_factory=QueueMetricsConfig)
    """What the store says about itself."""

    backend: QueueBackendConfig = option(default_factory=QueueBackendConfig)
    """Where the rows are."""

    num_global_batch: int = option(
        1, minimum=1, used_if=never("backend.SimpleStorage.total_storage_size bounds the store")
    )
    """Batches the store has room for."""

    storage_backend: str = option(
        "AsyncSimpleStorageManager",
        used_if=never("backend.storage_backend decides"),
    )
    """Class that manages the store."""

    num_data_storage_units: int = option(
        8, minimum=1, used_if=never("backend.SimpleStorage.num_data_storage_units decides")
    )
    """Processes that hold the data."""


@dataclass(kw_only=True)
class CheckpointConfig(BaseConfig):
    """Contents of one role's checkpoint. Where and how often is in `trainer`."""

    _target_: str = "verl.trainer.config.CheckpointConfig"

    save_contents: list[str] = option(default_factory=CONTENTS.copy, choices=CHOICES)
    """Any of `model`, `optimizer`, `extra` (schedule and random state) and `hf_model` (a folder
    that `from_pretrained` loads)."""

    load_contents: list[str] = option(
        default_factory=CONTENTS.copy, yaml="${.save_contents}", choices=CHOICES
    )
    """What a resumed run restores, from the same list."""

    async_save: bool = False
    """Copy the state to host memory and write it in the background while training goes on."""
