"""Layouts that do not divide the ranks or the model are refused, with the nearest that do."""

import pytest

from tests.tiny_models import tiny_config
from verl.config.engine import McoreEngineConfig
from verl.config.faults import ConfigError
from verl.workers.engine.megatron.layout import Layout, check_layout, padded_vocabulary

SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}


def layout(num_ranks, **sizes):
    keys = {SIZES[name]: size for name, size in sizes.items()}
    return Layout.of(McoreEngineConfig(**keys), num_ranks)


def test_the_rest_of_the_ranks_are_data_parallel():
    assert layout(16, tensor=2, pipeline=2, context=2) == Layout(
        tensor=2,
        pipeline=2,
        virtual_pipeline=None,
        context=2,
        expert=1,
        expert_tensor=2,
        data=2,
    )
    assert layout(16, tensor=2, pipeline=2, context=2).num_ranks == 16


def test_one_rank_leads_those_with_the_same_rows():
    sizes = layout(16, tensor=2, pipeline=2, context=2)
    assert [rank for rank in range(16) if sizes.leads(rank)] == [0, 4]
    assert [sizes.data_rank(rank) for rank in (0, 3, 4, 8, 12)] == [0, 0, 1, 0, 1]


def test_an_expert_is_split_like_the_rest_unless_stated():
    assert layout(8, tensor=4).expert_tensor == 4
    assert layout(8, tensor=4, expert=8, expert_tensor=1).expert_tensor == 1


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "text"),
    [
        (6, {"tensor": 4}, r"4 \* 1 \* 1 = 4\) must divide the 6 ranks .* 4 and 8.* 3 and 6"),
        (8, {"pipeline": 3}, r"1 \* 3 \* 1 = 3\) must divide the 8 ranks"),
        (4, {"tensor": 2, "expert": 4}, r"2 \* 4 \* 1 = 8\) must divide the 4 ranks"),
    ],
)
def test_ranks_that_the_sizes_do_not_divide_are_refused(num_ranks, sizes, text):
    with pytest.raises(ConfigError, match=text):
        layout(num_ranks, **sizes)


@pytest.mark.parametrize(
    ("model", "num_ranks", "sizes", "text"),
    [
        ("llama", 8, {"tensor": 8}, r"\(8\) must divide the model's 4 attention heads: 4"),
        ("llama", 4, {"tensor": 4}, r"\(4\) must divide the model's 2 KV heads: 2"),
        ("llama", 8, {"tensor": 2, "context": 4}, r"2 \* 4 = 8\) must divide .* 4 attention heads"),
        ("llama", 4, {"pipeline": 4}, r"\(4\) must divide the model's 2 layers; .* are 2"),
        ("llama", 2, {"virtual_pipeline": 2}, r"is 2, but there is one pipeline stage"),
        ("llama", 2, {"expert": 2}, "llama has no experts; set it to 1"),
        ("qwen3_moe", 3, {"expert": 3}, r"\(3\) must divide the model's 4 experts: 2 and 4"),
        ("qwen3_moe", 3, {"expert_tensor": 3}, r"\(3\) must divide the model's 16 columns"),
    ],
)
def test_a_model_that_the_layout_does_not_divide_is_refused(model, num_ranks, sizes, text):
    with pytest.raises(ConfigError, match=text):
        check_layout(layout(num_ranks, **sizes), McoreEngineConfig(), tiny_config(model))


def test_experts_may_be_spread_over_ranks_and_divided_by_columns_at_once():
    sizes = layout(8, tensor=2, expert=2, expert_tensor=2)
    engine = McoreEngineConfig(tensor_model_parallel_size=2)
    check_layout(sizes, engine, tiny_config("qwen3_moe"))


def test_latent_attention_has_no_groups_of_heads_to_divide():
    config = tiny_config("deepseek_v3", num_key_value_heads=1)
    check_layout(layout(2, tensor=2), McoreEngineConfig(tensor_model_parallel_size=2), config)


@pytest.mark.parametrize(
    ("model", "what"), [("qwen3_moe", "experts"), ("deepseek_v3", "latent attention")]
)
def test_what_needs_sequence_parallelism_is_refused_without_it(model, what):
    engine = McoreEngineConfig(tensor_model_parallel_size=2, sequence_parallel=False)
    with pytest.raises(ConfigError, match=f"has {what}, .* set it to True"):
        check_layout(Layout.of(engine, 2), engine, tiny_config(model))


def test_stages_that_the_user_makes_unequal_are_left_to_megatron():
    config, sizes = tiny_config("llama", num_hidden_layers=3), layout(2, pipeline=2)
    with pytest.raises(ConfigError, match="3 layers"):
        check_layout(sizes, McoreEngineConfig(), config)
    stages = {"num_layers_in_first_pipeline_stage": 1}
    check_layout(sizes, McoreEngineConfig(override_transformer_config=stages), config)


def test_the_vocabulary_is_filled_up_to_a_multiple():
    config = tiny_config("llama", vocab_size=97)
    assert [padded_vocabulary(config, size) for size in (1, 2, 4)] == [97, 98, 100]
