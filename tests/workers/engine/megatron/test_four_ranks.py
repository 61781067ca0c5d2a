"""Every pair of ways to divide a model over four ranks computes what one rank does."""

import pytest

from tests.utils.two_ranks import run_on_ranks
from tests.workers.engine.megatron.cases import (
    ADAM,
    after_two_layouts,
    assert_as_alone,
    assert_as_without_interruption,
    on_layout,
)

CLIPPED = {"optimizer": ADAM, "max_grad_norm": 0.5}
CONTEXT = {"context_parallel_size": 2}
SPREAD_AND_DIVIDED = {"expert": 2, "expert_tensor_parallel_size": 2}
AUX_LOSS = {"router_aux_loss_coef": 0.3}
CASES = {
    "tensor, pipeline": ("llama", {"tensor": 2, "pipeline": 2, **CLIPPED}),
    "tensor, context": ("qwen3", {"tensor": 2, **CONTEXT, **CLIPPED}),
    "tensor, data": ("qwen2", {"tensor": 2, **CLIPPED}),
    "tensor, expert": (
        "qwen3_moe",
        {"tensor": 2, "expert": 2, "expert_tensor_parallel_size": 1, **CLIPPED},
    ),
    "pipeline, context": ("qwen2", {"pipeline": 2, **CONTEXT, **CLIPPED}),
    "pipeline, data": ("qwen2", {"pipeline": 2, **CLIPPED}),
    "pipeline, expert": ("qwen3_moe", {"pipeline": 2, "expert": 2, **CLIPPED}),
    "context, data": ("llama", {**CONTEXT, **CLIPPED}),
    "context, expert": ("qwen3_moe", {**CONTEXT, "expert": 2, **CLIPPED}),
    "expert, data": ("mixtral", {"expert": 2, "changes": {"sliding_window": None}, **CLIPPED}),
    "expert and expert tensor, tensor": (
        "qwen3_moe",
        {"tensor": 2, **SPREAD_AND_DIVIDED, "changes": AUX_LOSS, **CLIPPED},
    ),
    "expert and expert tensor, data": ("qwen3_moe", {**SPREAD_AND_DIVIDED, **CLIPPED}),
    "expert and expert tensor, context": (
        "qwen3_moe",
        {**CONTEXT, **SPREAD_AND_DIVIDED, **CLIPPED},
    ),
    "expert tensor, pipeline": (
        "mixtral",
        {
            "pipeline": 2,
            "expert_tensor_parallel_size": 2,
            "changes": {"sliding_window": None},
            **CLIPPED,
        },
    ),
    "latent attention": (
        "deepseek_v3",
        {"tensor": 2, **CONTEXT, **SPREAD_AND_DIVIDED, "changes": AUX_LOSS, **CLIPPED},
    ),
    "four pipeline stages": ("llama", {"pipeline": 4, "changes": {"num_hidden_layers": 4}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_four_ranks_compute_what_one_does(name, tmp_path):
    model_type, options = CASES[name]
    found = run_on_ranks(4, lambda rank: on_layout(model_type, **options), tmp_path)
    assert_as_alone(model_type, found, **options)


@pytest.mark.slow
def test_experts_that_are_spread_and_divided_are_continued_otherwise(tmp_path):
    layouts = {"tensor": 2, **SPREAD_AND_DIVIDED}, {"pipeline": 2, "expert": 2}
    for number, (first, second) in enumerate([layouts, layouts[::-1]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = run_on_ranks(4, lambda rank: after_two_layouts(first, second, "qwen3_moe"), folder)  # noqa: B023
        assert_as_without_interruption(found, "qwen3_moe")
