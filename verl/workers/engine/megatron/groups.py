"""The process groups of a Megatron layout. megatron-core keeps them for the whole process."""

# megatron-core's own annotations leave out or mix up types of groups and modules.
# pyright: reportArgumentType=false

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import HashStore

from verl.utils.device import get_nccl_backend
from verl.utils.distributed import DEFAULT_TIMEOUT_SECONDS
from verl.workers.engine.megatron.layout import Layout
from verl.workers.engine.sharding import RankGroups


class LayoutGroups(RankGroups):
    """Groups as the other engines have them: `sequence` are the ranks that split the tokens."""

    def __init__(self) -> None:
        super().__init__()
        context: Any = parallel_state.get_context_parallel_group()
        self.sequence = context if dist.get_world_size(context) > 1 else None
        self.data = parallel_state.get_data_parallel_group()


def join_layout(layout: Layout, device: torch.device) -> LayoutGroups:
    """Make the groups of `layout`, or use those of an engine that was built before."""
    if not dist.is_initialized():  # a rank alone
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,cuda:{get_nccl_backend()}"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if parallel_state.model_parallel_is_initialized():
        refuse_other(layout)
        return LayoutGroups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=int(DEFAULT_TIMEOUT_SECONDS // 60),
        create_gloo_process_groups=False,
    )
    return LayoutGroups()


def refuse_other(layout: Layout) -> None:
    """Roles in one process share megatron-core's groups."""
    found = Layout(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
        data=parallel_state.get_data_parallel_world_size(),
    )
    if found != layout:
        raise ValueError(
            f"a model in this process is laid out as {found}, and another asks for {layout}; "
            "megatron-core has one layout for a process: state the same sizes for all roles that "
            "share their ranks (actor, ref, critic), or give them pools of their own"
        )
