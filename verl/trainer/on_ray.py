"""A training run on Ray: the driver joins or starts a cluster, an actor there runs the trainer.

    driver (this process)          runner (actor)               workers (actors)
      ray.init
      start the runner  -------->    build, init_workers  --->    load models
      wait, a second at a time       fit                  --->    generate, score, update
      SIGTERM: request_stop  ---->   finish the step, save
      its error, or what it says  <--

The runner needs no device; the kind that the workers use is found here and told to it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.config.base import ReadLog
from verl.config.convert import to_dictconfig
from verl.config.ppo import PPOConfig
from verl.config.ranks import ranks_beside, world_size
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.ppo.termination import Termination
from verl.trainer.task_runner import TaskRunner
from verl.utils.environment import ray_address, variables_of_verl
from verl.utils.exit_codes import EndsTheRun
from verl.utils.import_utils import require

LOOK_SECONDS = 1.0
STOP_SECONDS = 30.0
CPUS_PER_RANK = 3
"""What a pool reserves for each rank, one for each role that may share it."""


def run_on_ray(
    config: PPOConfig, user_set: Sequence[str], task_runner_class: Any = None
) -> list[str]:
    """Train; what to tell the user afterwards. `task_runner_class` may be an actor class."""
    ray = require("ray", "ray")
    ReadLog().attach(config)
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(**ray_init_arguments(config))
    try:
        return _run(ray, config, user_set, task_runner_class)
    finally:
        if config.ray_kwargs.timeline_json_file is not None:
            ray.timeline(filename=config.ray_kwargs.timeline_json_file)
        if is_ours:
            ray.shutdown()


def ray_init_arguments(config: PPOConfig) -> dict[str, Any]:
    """`ray_kwargs.ray_init`, with the environment that workers need under the user's own."""
    arguments = dict(config.ray_kwargs.ray_init)
    given: Mapping[str, Any] = arguments.get("runtime_env") or {}
    needed = get_ppo_ray_runtime_env()
    env_vars = {**needed.pop("env_vars"), **(given.get("env_vars") or {})}
    if config.transfer_queue.enable:
        env_vars["TRANSFER_QUEUE_ENABLE"] = "1"
    arguments["runtime_env"] = {**needed, **given, "env_vars": env_vars}
    starts_cluster = arguments.get("address") in (None, "local") and ray_address() is None
    if starts_cluster and config.trainer.device == "cpu" and arguments.get("num_cpus") is None:
        arguments["num_cpus"] = cpus_for_cpu_ranks(config)
    return arguments


def cpus_for_cpu_ranks(config: PPOConfig) -> int:
    """Ranks on a CPU are processes, of which a machine may have more than cores."""
    model = config.reward_model
    has_pool = model.enable and model.enable_resource_pool
    reward_ranks = model.nnodes * model.n_gpus_per_node if has_pool else 0
    listed = sum(len(pool["devices"]) for pool in config.resource_pool.values())
    return 1 + CPUS_PER_RANK * (world_size(config) + ranks_beside(config) + reward_ranks + listed)


def _run(ray: Any, config: PPOConfig, user_set: Sequence[str], task_runner_class: Any) -> list[str]:
    cls = task_runner_class or TaskRunner
    plain = cls if isinstance(cls, type) else cls.__ray_metadata__.modified_class
    actor_class = ray.remote(num_cpus=1)(cls) if isinstance(cls, type) else cls
    # The second thread is for `request_stop`, which comes while `run` runs.
    options = {"max_concurrency": 2, "runtime_env": runner_environment(ray, config)}
    runner = actor_class.options(**options).remote()
    if task_runner_class is None:
        reference = runner.run_and_report.remote(config, user_set)
    else:
        reference = runner.run.remote(to_dictconfig(config))
    try:
        return wait_for(ray, reference, runner if issubclass(plain, TaskRunner) else None) or []
    finally:
        ray.kill(runner)


def wait_for(ray: Any, reference: Any, runner: Any) -> Any:
    """The runner's answer. Ray tells when it dies, so the wait ends with it."""
    with Termination() as termination:
        has_told = False
        while not ray.wait([reference], timeout=LOOK_SECONDS)[0]:
            if termination.is_requested and not has_told:
                if runner is None:
                    raise SystemExit(128 + 15)
                ray.get(runner.request_stop.remote(), timeout=STOP_SECONDS)
                has_told = True
    try:
        return ray.get(reference, timeout=STOP_SECONDS)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, EndsTheRun):  # bad data, say: its message is enough
            raise error.cause from None
        raise


def runner_environment(ray: Any, config: PPOConfig) -> dict[str, Any]:
    """Variables that steer verl travel with the run, and so does the kind of device."""
    env_vars = {**variables_of_verl(), "VERL_FORCE_DEVICE": cluster_device(ray, config)}
    environment: dict[str, Any] = {"env_vars": env_vars}
    profiler = config.global_profiler
    if profiler.tool == "nsys" and profiler.steps:
        environment["nsight"] = dict(profiler.global_tool_config.nsys.controller_nsight_options)
    return environment


def cluster_device(ray: Any, config: PPOConfig) -> str:
    """What workers run on: `trainer.device`, or for `auto` the best that the cluster has."""
    if config.trainer.device != "auto":
        return config.trainer.device
    resources = ray.cluster_resources()
    return next(
        (name for name, key in (("cuda", "GPU"), ("npu", "NPU")) if key in resources), "cpu"
    )
