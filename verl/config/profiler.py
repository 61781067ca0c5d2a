"""When to profile, with which tool, and on which ranks.

`GlobalProfilerConfig` chooses the tool and the steps for the whole run; each role has a
`ProfilerConfig` that says whether it takes part. Nothing here starts a profiler.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from verl.config.base import BaseConfig, When, never, option
from verl.config.roles import ON_RAY, PROFILED

TOOLS = ("nsys", "npu", "torch", "torch_memory")


@dataclass(kw_only=True)
class NsightToolConfig(BaseConfig):
    """Nsight Systems."""

    _target_: str = "verl.utils.profiler.config.NsightToolConfig"

    discrete: bool = option(
        False, yaml="${oc.select:global_profiler.global_tool_config.nsys.discrete,false}"
    )
    """Write one database per task instead of one per run."""


@dataclass(kw_only=True)
class NPUToolConfig(BaseConfig):
    """The profiler of Ascend devices."""

    _target_: str = "verl.utils.profiler.config.NPUToolConfig"

    contents: list[str] = option(default_factory=list)
    """What to record: any of `npu`, `cpu`, `memory`, `shapes`, `module`, `stack`."""

    level: str = option("level0", choices=("level_none", "level0", "level1", "level2"))
    """How much detail to record."""

    analysis: bool = True
    """Parse the results when recording ends."""

    discrete: bool = False
    """Write one database per task instead of one per run."""


@dataclass(kw_only=True)
class TorchProfilerToolConfig(BaseConfig):
    """PyTorch's own profiler."""

    _target_: str = "verl.utils.profiler.config.TorchProfilerToolConfig"

    contents: list[str] = option(default_factory=list)
    """What to record: any of `cuda`, `cpu`, `memory`, `shapes`, `stack`."""

    discrete: bool = False
    """Write one trace per task instead of one per step."""


@dataclass(kw_only=True)
class TorchMemoryToolConfig(BaseConfig):
    """PyTorch's record of GPU memory allocations."""

    _target_: str = "verl.utils.profiler.config.TorchMemoryToolConfig"

    trace_alloc_max_entries: int = option(
        100000,
        yaml="${oc.select:"
        "global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries,100000}",
        minimum=1,
    )
    """Allocations kept; older ones are forgotten."""

    stack_depth: int = option(
        32,
        yaml="${oc.select:global_profiler.global_tool_config.torch_memory.stack_depth,32}",
        minimum=0,
        used_if=never("torch records whole stacks"),
    )
    """Stack frames kept per allocation."""


@dataclass(kw_only=True)
class ProfilerToolsConfig(BaseConfig):
    """Settings of each tool; only those of the chosen tool count."""

    nsys: NsightToolConfig = option(default_factory=NsightToolConfig)
    """Nsight Systems."""

    npu: NPUToolConfig = option(default_factory=NPUToolConfig)
    """The profiler of Ascend devices."""

    torch: TorchProfilerToolConfig = option(default_factory=TorchProfilerToolConfig)
    """PyTorch's own profiler."""

    torch_memory: TorchMemoryToolConfig = option(default_factory=TorchMemoryToolConfig)
    """PyTorch's record of GPU memory allocations."""


@dataclass(kw_only=True)
class ProfilerConfig(BaseConfig):
    """Whether, where and how one role is profiled."""

    _target_: str = "verl.utils.profiler.ProfilerConfig"

    tool: str | None = option(None, yaml="${oc.select:global_profiler.tool,null}", choices=TOOLS)
    """Profiling tool; null profiles nothing."""

    enable: bool = option(False, used_if=PROFILED)
    """Profile this role in the steps that `global_profiler.steps` names."""

    all_ranks: bool = option(
        False, used_if=When(lambda here, run: here.enable, "this profiler is not enabled")
    )
    """Profile every rank of the role."""

    ranks: list[int] = option(
        default_factory=list,
        used_if=When(lambda here, run: here.enable, "this profiler is not enabled"),
    )
    """Ranks to profile when `all_ranks` is off; without any, rank 0."""

    save_path: str | None = option(
        "outputs/profile",
        yaml="${oc.select:global_profiler.save_path,outputs/profile}",
        used_if=When(lambda here, run: here.enable, "this profiler is not enabled"),
    )
    """Folder for the results."""

    tool_config: ProfilerToolsConfig | None = option(
        default_factory=ProfilerToolsConfig,
        used_if=When(lambda here, run: here.enable, "this profiler is not enabled"),
    )
    """Settings of each tool."""

    def union(self, other: "ProfilerConfig") -> "ProfilerConfig":
        """Profile where either of the two does."""
        self._must_share_tool(other)
        return replace(
            self,
            enable=self.enable or other.enable,
            all_ranks=self.all_ranks or other.all_ranks,
            ranks=_sorted({*self.ranks, *other.ranks}),
        )

    def intersect(self, other: "ProfilerConfig") -> "ProfilerConfig":
        """Profile only where both do; `all_ranks` contains every rank."""
        self._must_share_tool(other)
        if self.all_ranks:
            ranks = set(other.ranks)
        elif other.all_ranks:
            ranks = set(self.ranks)
        else:
            ranks = set(self.ranks) & set(other.ranks)
        return replace(
            self,
            enable=self.enable and other.enable,
            all_ranks=self.all_ranks and other.all_ranks,
            ranks=_sorted(ranks),
        )

    def _must_share_tool(self, other: "ProfilerConfig") -> None:
        if self.tool != other.tool:
            raise ValueError(
                f"cannot combine profilers with the tools {self.tool!r} and {other.tool!r}; "
                f"give both roles the same `tool` or set `global_profiler.tool`"
            )


def _sorted(ranks: Iterable[int]) -> list[int]:
    return sorted(ranks)


FOLLOW_ACTOR_TOOLS = "${oc.select:actor_rollout_ref.actor.profiler.tool_config,null}"


@dataclass(kw_only=True)
class SharedToolProfilerConfig(ProfilerConfig):
    """A role that takes its tool settings from the actor."""

    tool_config: ProfilerToolsConfig | None = option(
        default_factory=ProfilerToolsConfig, yaml=FOLLOW_ACTOR_TOOLS
    )
    """Settings of each tool; the actor's unless set here."""


@dataclass(kw_only=True)
class RolloutProfilerConfig(SharedToolProfilerConfig):
    """The rollout runs beside the actor and is profiled with it."""

    enable: bool = option(False, yaml="${oc.select:actor_rollout_ref.actor.profiler.enable,false}")

    all_ranks: bool = option(
        False, yaml="${oc.select:actor_rollout_ref.actor.profiler.all_ranks,false}"
    )

    ranks: list[int] = option(
        default_factory=list, yaml="${oc.select:actor_rollout_ref.actor.profiler.ranks,[]}"
    )


def _controller_nsight_options() -> dict[str, Any]:
    return {
        "trace": "cuda,nvtx,cublas,ucx",
        "cuda-memory-usage": "true",
        "cuda-graph-trace": "graph",
    }


def _worker_nsight_options() -> dict[str, Any]:
    return {
        **_controller_nsight_options(),
        "capture-range": "cudaProfilerApi",
        "capture-range-end": None,
        "kill": "none",
    }


@dataclass(kw_only=True)
class GlobalNsightConfig(BaseConfig):
    """Nsight Systems for the whole run."""

    discrete: bool = False
    """Write one database per task instead of one per run."""

    controller_nsight_options: dict[str, Any] = option(
        default_factory=_controller_nsight_options, used_if=ON_RAY
    )
    """Command-line options of `nsys profile` for the controller process."""

    worker_nsight_options: dict[str, Any] = option(
        default_factory=_worker_nsight_options,
        used_if=never("workers are not started under nsys: start the run itself with it"),
    )
    """Command-line options of `nsys profile` for each worker. `capture-range` must stay
    `cudaProfilerApi`; a null `capture-range-end` is worked out from the number of steps."""


@dataclass(kw_only=True)
class GlobalTorchMemoryConfig(BaseConfig):
    """PyTorch's record of GPU memory allocations, for the whole run."""

    trace_alloc_max_entries: int = option(100000, minimum=1)
    """Allocations kept; older ones are forgotten."""

    stack_depth: int = option(32, minimum=0, used_if=never("torch records whole stacks"))
    """Stack frames kept per allocation."""

    context: str = option(
        "all", choices=("alloc", "state", "all"), used_if=never("torch records every event")
    )
    """Which events carry a stack: allocations, the state at the end, or all."""

    stacks: str = option(
        "all", choices=("python", "cpp", "all"), used_if=never("torch records every frame")
    )
    """Which frames a stack holds."""

    kw_args: dict[str, Any] = option(
        default_factory=dict, used_if=never("torch records with its defaults")
    )
    """More keyword arguments for `torch.cuda.memory._record_memory_history`."""


@dataclass(kw_only=True)
class GlobalToolsConfig(BaseConfig):
    """Settings of the tools that concern the whole run."""

    nsys: GlobalNsightConfig = option(default_factory=GlobalNsightConfig)
    """Nsight Systems."""

    torch_memory: GlobalTorchMemoryConfig = option(default_factory=GlobalTorchMemoryConfig)
    """PyTorch's record of GPU memory allocations."""


@dataclass(kw_only=True)
class GlobalProfilerConfig(BaseConfig):
    """Which steps of the run are profiled, and with what."""

    tool: str | None = option(
        None,
        choices=TOOLS,
        used_if=When(
            lambda here, run: bool(here.steps), "global_profiler.steps is null: no step is profiled"
        ),
    )
    """Profiling tool of every role that does not name its own; null profiles nothing."""

    steps: list[int] | None = None
    """Training steps to profile, counted from 1; null profiles none."""

    profile_continuous_steps: bool = option(
        False, used_if=never("each step has a result of its own")
    )
    """Record neighbouring steps into one result."""

    save_path: str = option(
        "outputs/profile",
        used_if=When(
            lambda here, run: bool(here.steps), "global_profiler.steps is null: no step is profiled"
        ),
    )
    """Folder for the results."""

    global_tool_config: GlobalToolsConfig = option(
        default_factory=GlobalToolsConfig,
        used_if=When(
            lambda here, run: bool(here.steps), "global_profiler.steps is null: no step is profiled"
        ),
    )
    """Settings of the tools that concern the whole run."""


@dataclass(kw_only=True)
class ProfileConfig(BaseConfig):
    """A span of steps to profile. For code that builds its profiler by hand."""

    _target_: str = "verl.trainer.config.ProfileConfig"

    profile_ranks: list[int] | None = None
    """Ranks to profile; null profiles rank 0."""

    step_start: int = option(-1, minimum=-1)
    """First step to profile; -1 profiles none."""

    step_end: int = option(-1, minimum=-1)
    """Last step to profile."""

    save_path: str | None = None
    """Folder for the results."""
