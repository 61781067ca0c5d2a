"""Import megatron-core without its warnings; leave no process group behind."""

import pytest
import torch.distributed as dist

from verl.workers.engine.megatron import leave_layout, load_library

load_library()


@pytest.fixture
def one_rank():
    """megatron-core's groups of one rank, taken down afterwards."""
    assert not dist.is_initialized()
    yield
    leave_layout()
