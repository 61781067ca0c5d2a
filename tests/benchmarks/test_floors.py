from types import SimpleNamespace

import pytest

from benchmarks.gpu.floors import Counts, decode_floor, forward_flops, training_flops
from benchmarks.gpu.shapes import model_config
from benchmarks.gpu.workload import Workload

SMALL = SimpleNamespace(
    hidden_size=8,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=5,
    vocab_size=10,
)
WORK = Workload(prompts=2, samples=3, prompt_tokens=4, new_tokens=5)
LAYERS = 3 * (8 * 2 * (2 * 4 + 2 * 2) + 3 * 8 * 5)


def test_a_decoder_counts_its_matrices_and_not_its_embedding():
    counts = Counts.of(SMALL)
    assert counts.layer_weights == LAYERS == 936
    assert counts.head_weights == 80
    assert counts.pair_flops == 3 * 4 * 2 * 4  # layers, heads, width; two products of two
    assert counts.kv_bytes == 3 * 2 * 2 * 2 * 2  # layers, keys and values, heads, width, bytes


def test_the_half_billion_shape_has_its_published_number_of_weights():
    counts = Counts.of(model_config("0.5B"))
    assert counts.layer_weights + counts.head_weights == 493_961_216
    assert counts.kv_bytes == 12_288


def test_a_pass_takes_the_head_on_responses_and_causal_pairs():
    counts = Counts.of(SMALL)
    pairs = 10 + 5 * 4 + 15  # prompt, response on prompt, response
    expected = 2 * 936 * 6 * 9 + 2 * 80 * 6 * 5 + 96 * 6 * pairs
    assert forward_flops(counts, WORK) == expected
    assert training_flops(counts, WORK) == 3 * expected


def test_a_shared_prompt_counts_once_per_group():
    counts = Counts.of(SMALL)
    saved = 2 * 936 * 4 * 4 + 96 * 4 * 10  # four of six prompts: their tokens and their pairs
    whole, shared = (forward_flops(counts, WORK, shares_prefix=share) for share in (False, True))
    assert whole - shared == saved


def test_the_decode_floor_is_the_sum_of_its_causes():
    counts = Counts.of(SMALL)
    floor = decode_floor(counts, WORK, matmul_tflops=1e-9, copy_tb_per_s=1e-9)  # 1000 a second
    assert floor["products"] == pytest.approx(4 * 2 * (936 + 80) * 6 / 1000)
    tokens_read = 6 * (1 + 2 + 3 + 4) + 4 * 2 * 4  # responses so far; both prompts in four steps
    assert floor["keys"] == pytest.approx(tokens_read * 48 / 1000)
    assert floor["logits"] == pytest.approx(4 * 6 * 10 * 2 / 1000)
    assert floor["prefill"] == pytest.approx((2 * 936 * 8 + 2 * 80 * 2 + 96 * 2 * 10) / 1000)
    parts = sum(floor[name] for name in ("products", "keys", "logits", "prefill"))
    assert floor["total"] == pytest.approx(parts)


def test_few_sequences_wait_for_the_weights_instead():
    counts = Counts.of(SMALL)
    floor = decode_floor(counts, WORK, matmul_tflops=1.0, copy_tb_per_s=1e-9)
    assert floor["products"] == pytest.approx(4 * (936 + 80) * 2 / 1000)
