"""A row's numbers do not depend on how many rows run beside it, as far as we claim it.

An exact model gives the same bits however it is run. Other models: on one thread, products of at
least `ROW_TILE` rows give each row the same bits. On several threads the library splits products
differently for different sizes, unless it is told not to (MKL_CBWR=AUTO,STRICT, which Intel's
library heeds on Intel's processors); then all that the engine reports is the same to the last bit.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from verl.models.exact import make_exact
from verl.models.forward import hidden_states, packed_layout, packed_positions
from verl.models.head import OutputHead, token_log_probs
from verl.models.loading import random_causal_lm
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine
from verl.workers.rollout.native.model_runner import ROW_TILE

WIDTHS = [(512, 512), (512, 1408), (1408, 512), (512, 16384), (896, 4864)]


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("inputs", "outputs"), WIDTHS)
def test_on_one_thread_products_from_the_row_tile_up_give_the_same_rows(
    one_thread, inputs, outputs
):
    rows, weight = torch.randn(8 * ROW_TILE, inputs), torch.randn(outputs, inputs)
    whole = torch.nn.functional.linear(rows, weight)
    for count in (ROW_TILE, 2 * ROW_TILE, 5 * ROW_TILE):
        assert torch.equal(torch.nn.functional.linear(rows[:count], weight), whole[:count])


def wide_model():
    config = AutoConfig.for_model(
        "llama",
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        eos_token_id=2,
    )
    return random_causal_lm(config)


def requests(count):
    return [
        GenerationRequest(
            request_id=str(number),
            prompt_ids=[(7 * number + place) % 4096 for place in range(37 * number % 120 + 1)],
            params=SamplingParams(seed=number, max_tokens=13 * number % 30 + 4, ignore_eos=True),
            num_samples=1 + number % 3,
        )
        for number in range(count)
    ]


def generate(model, work):
    limits = EngineLimits(max_num_seqs=40, max_prompt_tokens=128, max_response_tokens=64)
    return NativeEngine(model, limits, eos_token_ids=[2]).generate_batch(work)


def compare_alone_and_together(num_threads):
    """The largest difference of log-probabilities, at a realistic width; -1 if tokens differ."""
    torch.set_num_threads(num_threads)
    model, work, worst = wide_model(), requests(20), 0.0
    for one, expected in list(zip(work, generate(model, work), strict=True))[::4]:
        (alone,) = generate(model, [one])
        for output, other in zip(alone, expected, strict=True):
            if output.token_ids != other.token_ids:
                return -1.0
            pairs = zip(output.log_probs, other.log_probs, strict=True)
            worst = max(worst, *(abs(a - b) for a, b in pairs))
    return worst


@pytest.mark.parametrize("num_threads", [1, 2])
def test_an_exact_model_gives_the_bits_of_a_packed_training_pass(num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        model, work = make_exact(wide_model(), 192), requests(9)
        outputs = generate(model, work)
        pairs = [
            ([*one.prompt_ids], output.token_ids, output.log_probs)
            for one, samples in zip(work, outputs, strict=True)
            for output in samples
        ]
        lengths = [len(prompt) + len(response) for prompt, response, _ in pairs]
        ids = torch.tensor([token for prompt, response, _ in pairs for token in prompt + response])
        with torch.no_grad():
            layout = packed_layout(model, lengths)
            hidden = hidden_states(model, ids, packed_positions(lengths), layout)
            log_probs, _ = token_log_probs(hidden[:-1], OutputHead.of(model), ids[1:])
    finally:
        torch.set_num_threads(before)
    for (_, response, sampled), end in zip(pairs, itertools.accumulate(lengths), strict=True):
        assert log_probs[end - len(response) - 1 : end - 1].tolist() == sampled


@pytest.mark.parametrize("num_threads", [1, 2])
def test_neighbours_change_no_token_and_hardly_a_digit(num_threads):
    before = torch.get_num_threads()
    try:
        worst = compare_alone_and_together(num_threads)
    finally:
        torch.set_num_threads(before)
    assert 0 <= worst < 5e-6


def is_intel():
    """Whether MKL is there, and on a processor whose products it can make strict."""
    path = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and path.exists()
        and "GenuineIntel" in path.read_text(errors="replace")
    )


@pytest.mark.skipif(not is_intel(), reason="strict products need MKL and an Intel processor")
def test_with_strict_products_neighbours_change_no_bit():
    program = f"from {__name__} import *; print(compare_alone_and_together(num_threads=2))"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "MKL_CBWR": "AUTO,STRICT"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert result.stdout.strip() == "0.0"
