"""Import megatron-core without its warnings; leave no process group behind."""

import pytest
import torch.distributed as dist

from verl.utils.distributed import destroy_global_process_group
from verl.workers.engine.megatron import load_library

load_library()


@pytest.fixture
def one_rank():
    """megatron-core's groups of one rank, taken down afterwards."""
    from megatron.core import parallel_state

    assert not dist.is_initialized()
    yield
    parallel_state.destroy_model_parallel()
    destroy_global_process_group()
