"""Every way to divide a model between two ranks computes what one rank does."""

import pytest

from tests.utils.two_ranks import run_on_two_ranks
from tests.workers.engine.megatron.cases import ADAM, assert_as_alone, on_layout

FOUR_LAYERS = {"num_hidden_layers": 4}
CASES = {
    "tensor": ("llama", {"tensor": 2}),
    "tensor without sequence parallelism": ("qwen3", {"tensor": 2, "sequence_parallel": False}),
    "tensor, tied": ("qwen2", {"tensor": 2, "optimizer": ADAM, "max_grad_norm": 0.5}),
    "pipeline": ("llama", {"pipeline": 2, "optimizer": ADAM, "max_grad_norm": 0.5}),
    "pipeline, tied": ("qwen2", {"pipeline": 2}),
    "virtual": ("llama", {"pipeline": 2, "virtual_pipeline": 2, "changes": FOUR_LAYERS}),
    "context": ("llama", {"context_parallel_size": 2}),
    "data": ("qwen2", {"optimizer": ADAM, "max_grad_norm": 0.5}),
    "data, whole state": ("llama", {"use_distributed_optimizer": False}),
    "expert": ("qwen3_moe", {"expert": 2, "optimizer": ADAM, "max_grad_norm": 0.5}),
    "expert tensor": ("mixtral", {"tensor": 2, "changes": {"sliding_window": None}}),
}


@pytest.fixture(scope="module")
def found_by_two(tmp_path_factory):
    def work(rank):
        del rank
        found = {}
        for name, (model_type, options) in CASES.items():
            try:
                found[name] = on_layout(model_type, **options)
            except Exception as error:
                import traceback

                found[name] = "".join(traceback.format_exception(error)[-6:])
        return found

    return run_on_two_ranks(work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_does(name, found_by_two):
    model_type, options = CASES[name]
    found = [found[name] for found in found_by_two]
    for f in found:
        if isinstance(f, str):
            raise AssertionError(f)
    assert_as_alone(model_type, found, **options)
