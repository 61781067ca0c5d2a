"""Import paths that users' code has and that no file of ours stands behind, as one table.

An entry is a module: either the one that it stands for, or its names with their homes
("module:attribute"). The modules are made when they are imported, their names are looked up when
they are used, so an entry costs nothing and needs no optional package until then. `python -m` runs
an entry with `main`.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from verl.utils.import_utils import lazy_attribute


def names(home: str, *found: str, **others: str) -> dict[str, str]:
    """A table of names that are in `home`, and of others as name="module:attribute"."""
    return {name: f"{home}:{name}" for name in found} | others


_LOOPS = "verl.agent_loop"
_LOOP_NAMES = names(
    _LOOPS,
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AsyncLLMServerManager",
    "register",
    AgentLoopWorker=f"{_LOOPS}.llm_server:AgentLoopWorker",
)
_HELPERS = "verl.utils.recipe_helpers"
_PPO = "verl.trainer.main_ppo"
_PROCESS = "verl.workers.rollout.replica:EngineProcessRollout"
_PROFILER = "verl.utils.profiler"
_VISION = "verl.utils.dataset.vision_utils"
_MANAGERS = "verl.workers.reward_manager"
_SECTIONS = "verl.workers.config"
_WORKERS = names(
    "verl.workers.roles",
    "ActorRolloutRefWorker",
    "CriticWorker",
    "RewardModelWorker",
    AsyncActorRolloutRefWorker="verl.workers.roles:ActorRolloutRefWorker",
)
_SEPARATION = {
    "SeparateRayPPOTrainer": "verl.trainer.ppo.v1:PPOTrainerSeparateAsync",
    "DetachActorWorker": "verl.workers.roles:ActorRolloutRefWorker",
    "RolloutWorker": "verl.workers.roles:RolloutWorker",
}

OLD_PATHS: dict[str, str | dict[str, str]] = {
    "verl.base_config": "verl.config.base",
    "verl.checkpoint_engine": names(_HELPERS, "CheckpointEngineManager"),
    "verl.experimental": {},
    "verl.experimental.fully_async_policy": {},
    "verl.experimental.fully_async_policy.fully_async_main": {"main": f"{_PPO}:FULLY_ASYNC.main"},
    "verl.experimental.one_step_off_policy": {},
    "verl.experimental.one_step_off_policy.async_main_ppo": {"main": f"{_PPO}:ONE_STEP_OFF.main"},
    "verl.experimental.one_step_off_policy.main_ppo": {"main": f"{_PPO}:ONE_STEP_OFF.main"},
    "verl.experimental.transfer_queue": {},
    "verl.experimental.transfer_queue.main_ppo": {"main": f"{_PPO}:TRANSFER_QUEUE.main"},
    "verl.experimental.dataset": {},
    "verl.experimental.separation": _SEPARATION,
    "verl.experimental.separation.engine_workers": _SEPARATION,
    "verl.experimental.separation.ray_trainer": _SEPARATION,
    "verl.experimental.dataset.sampler": names(
        "verl.utils.dataset.rl_dataset", "AbstractCurriculumSampler", "AbstractSampler"
    ),
    "verl.experimental.dynamic_dataset": {},
    "verl.experimental.dynamic_dataset.dynamicgen_dataset": "verl.utils.dataset.dynamicgen_dataset",
    "verl.experimental.agent_loop.prometheus_utils": names(
        "verl.board.prometheus", "update_prometheus_config"
    ),
    "verl.experimental.agent_loop": _LOOP_NAMES,
    "verl.experimental.agent_loop.agent_loop": {
        **_LOOP_NAMES,
        "AgentLoopWorkerBase": f"{_LOOPS}.llm_server:AgentLoopWorker",
        "DictConfigWrap": f"{_LOOPS}:DictConfigWrap",
        "_agent_loop_registry": f"{_LOOPS}.base:agent_loops",
        "get_trajectory_info": f"{_LOOPS}.manager:get_trajectory_info",
    },
    "verl.experimental.agent_loop.single_turn_agent_loop": "verl.agent_loop.single_turn",
    "verl.experimental.agent_loop.tool_agent_loop": "verl.agent_loop.tool_agent",
    "verl.experimental.agent_loop.tool_parser": "verl.tools.parsers",
    "verl.experimental.teacher_loop": names(
        "verl.trainer.distillation.teaching",
        "Teaching",
        EndpointTeacher="verl.trainer.distillation.teaching:EndpointTeacher",
        TeacherWorker="verl.workers.roles.teacher:TeacherWorker",
    ),
    "verl.interactions.utils": {},
    "verl.interactions.utils.interaction_registry": "verl.interactions.registry",
    "verl.experimental.reward_loop": names(
        "verl.trainer.ppo.reward",
        "RewardLoopManager",
        "RewardLoopWorker",
        RewardModelManager="verl.workers.reward_model.server:RewardModelManager",
    ),
    "verl.experimental.reward_loop.reward_manager": f"{_MANAGERS}.configured",
    "verl.experimental.reward_loop.reward_manager.base": names(
        f"{_MANAGERS}.adapters", "RewardManagerBase"
    ),
    "verl.experimental.reward_loop.reward_manager.limited": names(
        f"{_MANAGERS}.configured",
        "RateLimitedRewardManager",
        AsyncTokenBucket=f"{_MANAGERS}.managers:AsyncTokenBucket",
    ),
    "verl.model_engine": {},
    "verl.model_engine.base": names("verl.workers.engine", "BaseEngine", "EngineRegistry"),
    "verl.models.transformers": {},
    "verl.models.transformers.monkey_patch": names(_HELPERS, "apply_monkey_patch"),
    "verl.models.transformers.qwen2_vl": names(_VISION, "get_rope_index"),
    "verl.models.transformers.qwen3_vl": names(_VISION, "get_rope_index"),
    "verl.third_party": {},
    "verl.third_party.vllm": names(
        _HELPERS, "VLLM_SLEEP_LEVEL", parallel_state="vllm.distributed.parallel_state"
    ),
    "verl.tools.utils": {},
    "verl.tools.utils.tool_registry": "verl.tools.tool_registry",
    "verl.trainer.config.algorithm": "verl.config.algorithm",
    "verl.trainer.config.config": "verl.trainer.config",
    "verl.trainer.fsdp": {},
    "verl.trainer.fsdp.fsdp_engine": names(
        "verl.workers.engine.fsdp", "FSDPEngine", BaseEngine="verl.workers.engine:BaseEngine"
    ),
    "verl.trainer.fsdp.hybrid_engine": {
        "HybridEngine": "verl.workers.rollout.replica:RolloutReplica"
    },
    "verl.trainer.megatron": {},
    "verl.trainer.megatron.megatron_engine": names(
        "verl.workers.engine.megatron", "MegatronEngine"
    ),
    "verl.trainer.ppo.rollout_corr_helper": "verl.algos.rollout_correction",
    "verl.utils.activation_offload": names(_HELPERS, "enable_activation_offloading"),
    "verl.utils.config": names(
        "verl.config.convert",
        "omega_conf_to_dataclass",
        "update_dict_with_config",
        validate_config="verl.config.validate:validate_config",
    ),
    "verl.utils.debug": _PROFILER,
    "verl.utils.debug.metrics": names("verl.trainer.ppo.metric_utils", "calculate_debug_metrics"),
    "verl.utils.debug.performance": "verl.utils.profiler.performance",
    "verl.utils.checkpoint.megatron_checkpoint_manager": {
        "MegatronCheckpointManager": (
            "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager"
        )
    },
    "verl.utils.megatron_utils": names("verl.workers.engine.megatron", "load_library"),
    "verl.utils.memory_utils": names(_HELPERS, "aggressive_empty_cache"),
    "verl.utils.net_utils": names(_HELPERS, "get_free_port", "is_valid_ipv6_address"),
    "verl.utils.profiler.config": "verl.config.profiler",
    "verl.utils.profiler.performance": names(
        _PROFILER,
        "log_gpu_memory_usage",
        "marked_timer",
        "simple_timer",
        reduce_timing=f"{_HELPERS}:reduce_timing",
        topk_reduce_ratio_min_max=f"{_HELPERS}:topk_reduce_ratio_min_max",
    ),
    "verl.single_controller.ray.base": names(
        "verl.single_controller.ray",
        "RayClassWithInitArgs",
        "RayResourcePool",
        "RayWorkerGroup",
        "ResourcePoolManager",
        "SubRayResourcePool",
        "create_colocated_worker_cls",
        "create_colocated_worker_cls_fused",
        "create_colocated_worker_raw_cls",
        "extract_pg_from_exist",
        "merge_resource_pool",
        "sort_placement_group_by_node_ip",
        "split_resource_pool",
        get_random_string=f"{_HELPERS}:get_random_string",
    ),
    "verl.utils.resource_pool_manager": names("verl.single_controller.ray", "ResourcePoolManager"),
    "verl.utils.reward_score.prime_code.testing_util": names(
        "verl.utils.reward_score.prime_code", "run_test"
    ),
    "verl.utils.skip": names("verl.utils.rollout_skip", "RolloutSkip", "SkipManager"),
    "verl.utils.tokenizer.continuous_token": "verl.utils.dataset.continuous_token",
    "verl.utils.trainer": {},
    "verl.utils.trainer.core_algos": "verl.trainer.ppo.core_algos",
    "verl.utils.transferqueue_utils": names(
        "verl.data_plane.batch",
        "create_transferqueue_client",
        "get_transferqueue_client",
        "tqbridge",
    ),
    "verl.utils.vllm": {},
    "verl.utils.vllm.patch": names(_HELPERS, "patch_vllm_moe_model_weight_loader"),
    **{
        f"{_SECTIONS}.{section}": _SECTIONS
        for section in (
            *("actor", "critic", "engine", "model"),
            *("optimizer", "reward_model", "rollout"),
        )
    },
    "verl.workers.engine_workers": names(
        "verl.workers.roles", "ActorRolloutRefWorker", "TrainingWorker"
    ),
    "verl.workers.fsdp_workers": _WORKERS
    | names(_HELPERS, "create_device_mesh", "get_sharding_strategy"),
    "verl.workers.megatron_workers": _WORKERS,
    "verl.workers.rollout.async_server": names(
        "verl.workers.rollout.replica",
        "RolloutReplica",
        AsyncLLMServerManager=f"{_LOOPS}:AsyncLLMServerManager",
    ),
    "verl.workers.rollout.sglang": {"SGLangRollout": _PROCESS},
    "verl.workers.rollout.sglang_rollout.sglang_rollout": {"SGLangRollout": _PROCESS},
    "verl.workers.rollout.vllm": {"vLLMRollout": _PROCESS},
    "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd": {"vLLMRollout": _PROCESS},
    "verl.workers.rollout.llm_server": "verl.agent_loop.llm_server",
    "verl.workers.rollout.schemas": {"Message": "verl.tools.schemas:Message"},
    "verl.workers.sharding_manager": {},
    "verl.workers.sharding_manager.fsdp_ulysses": names(
        "verl.utils.ulysses", "FSDPUlyssesShardingManager"
    ),
    "verl.workers.utils": {},
    "verl.workers.utils.padding": names(
        "verl.utils.attention_utils", "left_right_2_no_padding", "no_padding_2_padding"
    ),
}


class OldPaths(MetaPathFinder, Loader):
    """Makes the modules of the table; asked first, since a folder that an earlier version of the
    package left behind would count as a module without names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in OLD_PATHS:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in OLD_PATHS)
        return ModuleSpec(fullname, self, origin=__file__, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        entry = OLD_PATHS[module.__name__]
        module.__doc__ = "An older import path; `verl.utils.old_paths` says what it stands for."
        if isinstance(entry, str):
            module.__dict__["__getattr__"] = partial(of_module, entry)
        else:
            module.__dict__["__all__"] = list(entry)
            module.__dict__["__getattr__"] = partial(lazy_attribute, module.__name__, entry)

    def get_code(self, fullname: str) -> CodeType:
        """What `python -m` runs; `__main__` is also the name in processes that it spawns."""
        call = f'if __name__ == "__main__":\n    import {fullname} as command\n    command.main()'
        return compile(call, fullname, "exec")


def of_module(home: str, name: str) -> Any:
    """What `home` has under a name; `__all__` is every name without an underscore."""
    if name.startswith("__") and name != "__all__":  # `inspect` looks at `__file__` of everybody
        raise AttributeError(f"an older import path of {home} has no {name}")
    module = import_module(home)
    if name == "__all__" and "__all__" not in vars(module):
        return [one for one in vars(module) if not one.startswith("_")]
    return getattr(module, name)


def install() -> None:
    """Let Python find the modules of the table; doing so twice changes nothing."""
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldPaths())
