"""Two ranks compute what one does however they divide a model, and continue each other's runs."""

import pytest
import torch

from tests.utils.two_ranks import run_on_two_ranks
from tests.workers.engine.megatron.cases import (
    ADAM,
    after_two_layouts,
    assert_as_alone,
    assert_as_without_interruption,
    on_layout,
)
from verl.workers.engine.megatron.cpu import reduce_scatter

CLIPPED = {"optimizer": ADAM, "max_grad_norm": 0.5}
CASES = {
    "tensor": ("llama", {"tensor": 2, **CLIPPED}),
    "pipeline, tied": ("qwen2", {"pipeline": 2, **CLIPPED}),
    "context": ("llama", {"context_parallel_size": 2}),
    "data": ("qwen2", CLIPPED),
    "expert": ("qwen3_moe", {"expert": 2, **CLIPPED}),
    "tensor of latent attention": ("deepseek_v3", {"tensor": 2, **CLIPPED}),
}
AUX_LOSS = {"router_aux_loss_coef": 0.3}
FOUR_LAYERS = {"num_hidden_layers": 4}
MORE_CASES = {
    "tensor without sequence parallelism": ("qwen3", {"tensor": 2, "sequence_parallel": False}),
    "tensor, tied": ("qwen2", {"tensor": 2, **CLIPPED}),
    "tensor, a vocabulary that two do not divide": (
        "llama",
        {"tensor": 2, "changes": {"vocab_size": 97}},
    ),
    "pipeline": ("llama", {"pipeline": 2}),
    "virtual": ("llama", {"pipeline": 2, "virtual_pipeline": 2, "changes": FOUR_LAYERS}),
    "recomputed": ("llama", {"tensor": 2, "options": {"gradient_checkpointing": True}}),
    "recomputed pipeline": ("llama", {"pipeline": 2, "options": {"gradient_checkpointing": True}}),
    "data, whole state": ("llama", {"use_distributed_optimizer": False, **CLIPPED}),
    "tensor of experts": ("mixtral", {"tensor": 2, "changes": {"sliding_window": None}}),
    "experts of tensor ranks": (
        "qwen3_moe",
        {"tensor": 2, "expert": 2, "expert_tensor_parallel_size": 1, **CLIPPED},
    ),
    "tensor of experts alone": ("qwen3_moe", {"expert_tensor_parallel_size": 2, **CLIPPED}),
    "tensor but of experts": (
        "qwen3_moe",
        {"tensor": 2, "expert_tensor_parallel_size": 1, "changes": AUX_LOSS, **CLIPPED},
    ),
    "pipeline of experts": ("qwen3_moe", {"pipeline": 2, "changes": AUX_LOSS, **CLIPPED}),
    "virtual pipeline of experts, recomputed": (
        "qwen3_moe",
        {
            "pipeline": 2,
            "virtual_pipeline": 2,
            "changes": {**FOUR_LAYERS, **AUX_LOSS},
            "options": {"gradient_checkpointing": True},
            **CLIPPED,
        },
    ),
    "pipeline of latent attention": ("deepseek_v3", {"pipeline": 2, **CLIPPED}),
    "context of latent attention": (
        "deepseek_v3",
        {"context_parallel_size": 2, "expert": 2, "changes": AUX_LOSS, **CLIPPED},
    ),
    "tensor of latent attention, recomputed": (
        "deepseek_v3",
        {
            "tensor": 2,
            "expert": 2,
            "expert_tensor_parallel_size": 1,
            "changes": {"q_lora_rank": None, **AUX_LOSS},
            "options": {"gradient_checkpointing": True},
            **CLIPPED,
        },
    ),
    "context of experts": (
        "qwen3_moe",
        {"context_parallel_size": 2, "expert": 2, "changes": AUX_LOSS, **CLIPPED},
    ),
}
MOVES = {
    "tensor to pipeline": ({"tensor": 2}, {"pipeline": 2}),
    "pipeline to data": ({"pipeline": 2}, {}),
    "data to context": ({}, {"context_parallel_size": 2}),
    "whole state to tensor": ({"use_distributed_optimizer": False}, {"tensor": 2}),
}


def run(cases, folder):
    """What both ranks found in each case."""

    def work(rank):
        del rank
        return {name: on_layout(model_type, **options) for name, (model_type, options) in cases}

    found = run_on_two_ranks(work, folder)
    return {name: [own[name] for own in found] for name, _ in cases}


@pytest.fixture(scope="module")
def found_by_two(tmp_path_factory):
    return run(CASES.items(), tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_does(name, found_by_two):
    model_type, options = CASES[name]
    assert_as_alone(model_type, found_by_two[name], **options)


def test_a_checkpoint_of_one_layout_is_continued_by_another(tmp_path):
    moves = MOVES["tensor to pipeline"]
    assert_as_without_interruption(
        run_on_two_ranks(lambda rank: after_two_layouts(*moves), tmp_path)
    )


def test_parts_of_different_lengths_are_summed_and_shared_out(tmp_path):
    def work(rank):
        parts = [torch.arange(3.0) + rank, torch.arange(5.0) * 10 + rank]
        output = torch.full_like(parts[rank], -1)
        reduce_scatter(refuse, output, parts)
        return output.tolist()

    def refuse(*arguments, **options):
        raise AssertionError("gloo takes parts of one length")

    assert run_on_two_ranks(work, tmp_path) == [[1, 3, 5], [1, 21, 41, 61, 81]]


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CASES)
def test_two_ranks_compute_what_one_does_in_other_ways(name, tmp_path):
    model_type, options = MORE_CASES[name]
    found = run([(name, MORE_CASES[name])], tmp_path)
    assert_as_alone(model_type, found[name], **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVES)
def test_any_layout_continues_any_other(name, tmp_path):
    found = run_on_two_ranks(lambda rank: after_two_layouts(*MOVES[name]), tmp_path)
    assert_as_without_interruption(found)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_experts_move_with_their_moments(model_type, tmp_path):
    layouts = {"expert": 2}, {"tensor": 2}
    found = run_on_two_ranks(lambda rank: after_two_layouts(*layouts, model_type), tmp_path)
    assert_as_without_interruption(found, model_type)
