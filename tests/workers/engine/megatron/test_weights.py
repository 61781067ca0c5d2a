"""Hugging Face models in megatron-core: the same logits, and their weights to the bit and back."""

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import save_file

from tests.tiny_models import plain_twin, tiny_config, tiny_model
from tests.utils.two_ranks import run_on_ranks
from verl.config.engine import McoreEngineConfig
from verl.config.faults import ConfigError
from verl.models.packed import PackedLayout
from verl.workers.engine.megatron.attention import PackedRows
from verl.workers.engine.megatron.cpu import on_this_device, without_random_state
from verl.workers.engine.megatron.layout import Layout
from verl.workers.engine.megatron.model import build_chunks, transformer_config
from verl.workers.engine.megatron.weights import (
    export_weights,
    gather,
    load_weights,
    local_weights,
    read_tensors,
)

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def model_of(name, **changes):
    if name == "mixtral":
        changes["sliding_window"] = None
    model = tiny_model(name, **changes)
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if value.dim() == 1:  # norms, biases and corrections that differ from each other
                value.add_(torch.randn(len(value), generator=seeded(len(key))) / 10)
    return model


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def chunks_of(config, num_ranks=1, dtype=torch.float32, is_value_model=False, **sizes):
    engine = McoreEngineConfig(**sizes)
    layout = Layout.of(engine, num_ranks)
    without_random_state()
    with on_this_device():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            layout.virtual_pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
        )
        return build_chunks(config, engine, layout, dtype, is_value_model=is_value_model)


def whole(model):
    """Tied weights once."""
    state, names = model.state_dict(), {n for n, _ in model.named_parameters()}
    names |= {n for n, _ in model.named_buffers()}
    return {name: value for name, value in state.items() if name in names}


def differing(expected, exported):
    """Names whose bits differ, and whether there are more or fewer names or another order."""
    names = [] if list(expected) == list(exported) else ["other names"]
    return names + [
        name
        for name, value in exported.items()
        if value.dtype != expected[name].dtype
        or not torch.equal(value.view(torch.uint8), expected[name].view(torch.uint8))
    ]


def logits_of(chunk, ids):
    packed = PackedRows(
        layout=PackedLayout([len(ids)], torch.device("cpu")),
        positions=torch.arange(len(ids)),
        max_seqlen_q=len(ids),
        max_seqlen_kv=len(ids),
    )
    chunk.eval()
    with on_this_device(), torch.no_grad():
        return chunk(ids[None], torch.arange(len(ids))[None], None, packed_seq_params=packed)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_hugging_face_model(family, tmp_path, **changes):
    model = model_of(family, vocab_size=97, **changes)
    ids = torch.randint(0, 97, (40,), generator=seeded(0))
    expected = plain_twin(model)(ids[None]).logits[0].detach()

    def work(rank):
        chunks = chunks_of(model.config)
        load_weights(chunks, model.config, model.state_dict().items())
        logits = logits_of(chunks[0], ids)
        return (logits - expected).abs().max().item(), differing(
            whole(model), dict(export_weights(chunks, model.config))
        )

    [(error, others)] = run_on_ranks(1, work, tmp_path)
    assert error < 1e-5 * expected.abs().max()
    assert not others


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 512}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 16}),
        ("qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2}),
        ("deepseek_v3", {"q_lora_rank": None}),
    ],
)
def test_variants_of_a_family_give_the_same_logits(family, changes, tmp_path):
    test_logits_are_those_of_the_hugging_face_model(family, tmp_path, **changes)


@pytest.mark.parametrize(
    ("family", "num_ranks", "sizes"),
    [
        ("qwen2", 2, {"tensor_model_parallel_size": 2}),
        ("qwen2", 2, {"pipeline_model_parallel_size": 2}),
        ("qwen3", 2, {"context_parallel_size": 2}),
        ("qwen3_moe", 2, {"expert_model_parallel_size": 2}),
        ("mixtral", 2, {"tensor_model_parallel_size": 2}),
        ("deepseek_v3", 2, {"tensor_model_parallel_size": 2}),
        pytest.param(
            "llama",
            2,
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "deepseek_v3",
            4,
            {
                "tensor_model_parallel_size": 2,
                "expert_tensor_parallel_size": 1,
                "expert_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3_moe",
            4,
            {
                "tensor_model_parallel_size": 2,
                "expert_tensor_parallel_size": 2,
                "expert_model_parallel_size": 2,
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_export_what_was_loaded_to_the_bit(family, num_ranks, sizes, tmp_path):
    stages = 4 if sizes.get("virtual_pipeline_model_parallel_size") else 2
    model = model_of(family, vocab_size=97, num_hidden_layers=stages)

    def work(rank):
        chunks = chunks_of(model.config, num_ranks, **sizes)
        load_weights(chunks, model.config, model.state_dict().items())
        held = sum(weight.numel() for chunk in chunks for weight in chunk.parameters())
        doubled = dict(gather(chunks, model.config, lambda weight: 2 * weight.tensor))
        expected = {name: 2 * value for name, value in whole(model).items()}
        exported = dict(export_weights(chunks, model.config))
        return held, differing(whole(model), exported), differing(expected, doubled)

    answers = run_on_ranks(num_ranks, work, tmp_path)
    assert [others for _, *others in answers] == [[[], []]] * num_ranks
    if "context_parallel_size" not in sizes:
        total = sum(weight.numel() for weight in model.parameters())
        assert max(held for held, *_ in answers) < 0.8 * total, "ranks share the weights"


def test_every_element_of_a_weight_is_in_one_piece(tmp_path):
    """But for the padding of the vocabulary, so optimizer state moves between layouts with it."""
    config = tiny_config("qwen3_moe", vocab_size=97)

    def work(rank):
        chunks, uncovered = chunks_of(config, 2, tensor_model_parallel_size=2), {}
        for weight in local_weights(chunks, config):
            count = torch.zeros(weight.tensor.shape)
            for piece in weight.pieces:
                count[piece.inside] += 1
            if (count != 1).any():
                uncovered[weight.name] = int((count == 0).sum())
        return uncovered

    assert run_on_ranks(2, work, tmp_path) == [
        {},
        {"embedding.word_embeddings.weight": 32, "output_layer.weight": 32},
    ]


def test_a_value_model_has_the_head_of_its_checkpoint_or_zeros(tmp_path):
    model = model_of("qwen2")
    head = {"score.weight": torch.randn(1, 32), "score.bias": torch.randn(1)}
    ids = torch.randint(0, 96, (9,), generator=seeded(0))
    states = plain_twin(model).model(ids[None]).last_hidden_state[0].detach()

    def work(rank):
        chunks = chunks_of(model.config, is_value_model=True)
        load_weights(chunks, model.config, model.state_dict().items())
        fresh = logits_of(chunks[0], ids).abs().max().item()
        load_weights(chunks, model.config, {**model.state_dict(), **head}.items())
        expected = states @ head["score.weight"].T + head["score.bias"]
        error = (logits_of(chunks[0], ids) - expected).abs().max().item()
        names = [name for name, _ in export_weights(chunks, model.config)]
        return fresh, error, "lm_head.weight" in names, names[-2:]

    [(fresh, error, has_output, last)] = run_on_ranks(1, work, tmp_path)
    assert fresh == 0.0
    assert error < 1e-5
    assert not has_output
    assert last == ["score.weight", "score.bias"]


def test_the_files_of_a_model_with_experts_are_read_as_they_are(tmp_path):
    """In files each expert is a tensor of its own, under names that differ between families."""
    for number, family in enumerate(("qwen3_moe", "mixtral")):
        model = model_of(family)
        folder = tmp_path / family
        model.save_pretrained(folder)
        assert any(".experts.3." in name for name, _ in read_tensors(folder))

        def work(rank, model=model, folder=folder):
            chunks = chunks_of(model.config, 2, expert_model_parallel_size=2)
            load_weights(chunks, model.config, read_tensors(folder))
            return differing(whole(model), dict(export_weights(chunks, model.config)))

        (tmp_path / str(number)).mkdir()
        assert run_on_ranks(2, work, tmp_path / str(number)) == [[], []]


def test_missing_and_unknown_weights_are_named(tmp_path):
    model = model_of("qwen2")
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")

    def work(rank):
        chunks, messages = chunks_of(model.config), []
        for tensors in (
            read_tensors(tmp_path),
            [*model.state_dict().items(), ("model.layers.0.mlp.c_fc.weight", torch.ones(1))],
        ):
            with pytest.raises(ValueError, match="weight") as caught:
                load_weights(chunks, model.config, tensors)
            messages.append(str(caught.value))
        return messages

    [(missing, unknown)] = run_on_ranks(1, work, tmp_path)
    assert missing.startswith("25 weights of qwen2 are missing or incomplete, among them model.emb")
    assert unknown == "model.layers.0.mlp.c_fc.weight is not a weight of qwen2"


@pytest.mark.parametrize(
    ("model", "changes", "text"),
    [
        ("gemma", {}, "no table for model_type 'gemma'"),
        ("mistral", {}, "sliding window"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3", {"attention_bias": True}, "attention_bias is set"),
        ("llama", {"rope_parameters": {**LLAMA3, "rope_type": "dynamic"}}, "rope_type 'dynamic'"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False"),
        ("deepseek_v3", {"num_experts_per_tok": 4}, "must be twice topk_group"),
    ],
)
def test_a_model_that_megatron_would_run_otherwise_is_refused(model, changes, text):
    engine = McoreEngineConfig()
    with pytest.raises(ConfigError, match=text):
        transformer_config(
            tiny_config(model, **changes), engine, Layout.of(engine, 1), torch.float32
        )


def test_overrides_are_fields_of_megatron():
    config, layout = tiny_config("llama"), Layout.of(McoreEngineConfig(), 1)

    def built(**overrides):
        engine = McoreEngineConfig(override_transformer_config=overrides)
        return transformer_config(config, engine, layout, torch.float32)

    values = built(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert values.recompute_granularity == "full"
    with pytest.raises(ConfigError, match="did you mean 'recompute_granularity'"):
        built(recompute_granulatity="full")
