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
from verl.workers.engine.megatron.model import build_chunks
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
        layout=PackedLayout([len(ids)], torch.device("cpu")), max_seqlen_q=len(ids)
    )
    packed.max_seqlen_kv = len(ids)
    chunk.eval()
    with on_this_device(), torch.no_grad():
        return chunk(
            ids[None], torch.arange(len(ids))[None], None, packed_seq_params=packed
        )[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_hugging_face_model(family, tmp_path):
    model = model_of(family, vocab_size=97)
    ids = torch.randint(0, 97, (13,), generator=seeded(0))
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
