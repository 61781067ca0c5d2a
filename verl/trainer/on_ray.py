"""A training run on Ray: the driver joins or starts a cluster, an actor there runs the trainer.

    driver (this process)          runner (actor)               workers (actors)
      ray.init
      start the runner  -------->    build, init_workers  --->    load models
      wait, a second at a time       fit                  --->    generate, score, update
      Ctrl-C, SIGTERM: stop  ---->   finish the step, save
      its error, or what it says  <--

The runner needs no device; the kind that the workers use is found here and told to it. What the
run has reserved on the cluster is given back here, however it ended: Ray keeps the reservations of
a dead runner until the driver ends, and a driver may run many trainings.
"""

import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any

from verl.config.convert import to_dictconfig
from verl.config.ppo import PPOConfig
from verl.config.roles import ranks_beside, teacher_ranks, world_size
from verl.trainer.common import Termination
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.recipes import runner_of
from verl.trainer.task_runner import TaskRunner
from verl.utils.environment import EndsTheRun, ray_address, variables_of_verl
from verl.utils.import_utils import require

LOOK_SECONDS = 1.0
STOP_SECONDS = 30.0
START_NOTICE_SECONDS, START_SECONDS = 20.0, 300.0
"""When to log that the runner waits for resources, and when to give up."""

CPUS_PER_RANK = 3
"""What a pool reserves for each rank, one for each role that may share it."""

logger = logging.getLogger(__name__)


def run_on_ray(config: PPOConfig, task_runner_class: Any = None) -> None:
    """Train; `task_runner_class` may be an actor class."""
    ray = require("ray", "ray")
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(**ray_init_arguments(config))
    try:
        _run(ray, config, task_runner_class)
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
    ranks = world_size(config) + ranks_beside(config) + teacher_ranks(config)
    return 1 + CPUS_PER_RANK * (ranks + reward_ranks + listed)


def _run(ray: Any, config: PPOConfig, task_runner_class: Any) -> None:
    cls = task_runner_class or runner_of(config)
    plain = cls if isinstance(cls, type) else cls.__ray_metadata__.modified_class
    actor_class = ray.remote(num_cpus=1)(cls) if isinstance(cls, type) else cls
    run_id = uuid.uuid4().hex[:8]
    # The second thread is for `request_stop`, which comes while `run` runs.
    options = {"max_concurrency": 2, "runtime_env": runner_environment(ray, config, run_id)}
    runner = actor_class.options(**options).remote()
    try:
        with Termination(does_save=config.trainer.save_freq > 0) as termination:
            wait_for_start(ray, runner, START_NOTICE_SECONDS, START_SECONDS, termination)
            is_usual = task_runner_class is None
            reference = runner.run.remote(config if is_usual else to_dictconfig(config))
            asked = runner if issubclass(plain, TaskRunner) else None
            wait_for(ray, reference, asked, termination)
    finally:
        ray.kill(runner)
        release_pools(ray, run_id)


def wait_for_start(
    ray: Any, runner: Any, notice_seconds: float, seconds: float, termination: Termination
) -> None:
    """Wait until the cluster has placed the runner; a run that has not begun ends at once."""
    begin = time.monotonic()
    ready, has_told = runner.__ray_ready__.remote(), False
    while not ray.wait([ready], timeout=LOOK_SECONDS)[0]:
        if termination.is_requested:
            raise SystemExit(128 + 15)
        waited = time.monotonic() - begin
        needs = f"it needs a CPU, and of {ray.cluster_resources()} there are free "
        if waited > seconds:
            raise ValueError(
                f"the cluster has found no place for the run's runner within {seconds:g} s: {needs}"
                f"{ray.available_resources()}; end what else runs there, or add nodes"
            )
        if waited > notice_seconds and not has_told:
            logger.warning("the runner waits for a place: %s%s", needs, ray.available_resources())
            has_told = True
    ray.get(ready, timeout=STOP_SECONDS)  # an error of its start, if there was one


def release_pools(ray: Any, run_id: str) -> None:
    """Give back every placement group of a run; its name has the run's id."""
    for group in ray.util.placement_group_table().values():
        if run_id in group["name"] and group["state"] != "REMOVED":
            ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))


def wait_for(ray: Any, reference: Any, runner: Any, termination: Termination) -> Any:
    """The runner's answer. Ray tells when it dies, so the wait ends with it."""
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


def runner_environment(ray: Any, config: PPOConfig, run_id: str) -> dict[str, Any]:
    """Variables that steer verl travel with the run, and so do its id and the kind of device."""
    own = {"VERL_RUN_ID": run_id, "VERL_FORCE_DEVICE": cluster_device(ray, config)}
    env_vars = {**variables_of_verl(), **own}
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
