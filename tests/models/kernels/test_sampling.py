"""The sampling kernels draw what the plain sampler draws, token for token."""

import pytest
import torch

from tests.models.kernels.devices import on_each_device
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.native.rows import RowSettings
from verl.workers.rollout.native.sampler import Needs, next_tokens

SEEDS = [7919 * i - (i % 3) * 2**61 for i in range(40)]


def settings_of(params, device):
    return RowSettings.of(params, SEEDS[: len(params)], torch.device(device))


@on_each_device
@pytest.mark.parametrize("vocabulary", [50, 4096, 9001])
def test_tokens_and_log_probs_are_those_of_the_plain_sampler(device, vocabulary):
    from verl.models.kernels.sampling import draw_tokens

    params = [
        SamplingParams(temperature=0.0 if i % 5 == 0 else (1.0 if i % 2 else 0.7))
        for i in range(len(SEEDS))
    ]
    settings = settings_of(params, device)
    logits = 3 * torch.randn(len(SEEDS), vocabulary, device=device)
    index = torch.arange(len(SEEDS), device=device)
    tokens, log_probs = draw_tokens(
        logits, settings.temperature, settings.is_greedy, settings.seed, index
    )
    expected, expected_log_probs = next_tokens(logits, settings, Needs.of(params), index)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=0, atol=4e-6)


@on_each_device
def test_scale_and_soft_cap_come_before_the_temperature(device):
    from verl.models.kernels.sampling import draw_tokens

    params = [SamplingParams(temperature=0.5)] * 8
    settings = settings_of(params, device)
    logits = 5 * torch.randn(8, 300, device=device)
    index = torch.arange(8, device=device)
    columns = (settings.temperature, settings.is_greedy, settings.seed, index)
    tokens, log_probs = draw_tokens(logits, *columns, scale=0.25, softcap=2.0)
    capped = 2.0 * torch.tanh(logits * 0.25 / 2.0)
    expected, expected_log_probs = next_tokens(capped, settings, Needs.of(params), index)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=0, atol=4e-6)


@on_each_device
def test_a_token_of_no_weight_is_never_drawn_and_nan_is_seen(device):
    from verl.models.kernels.sampling import draw_tokens

    logits = torch.full((40, 5000), -torch.inf, device=device)
    logits[:, 4500] = 1.0
    settings = settings_of([SamplingParams()] * 40, device)
    index = torch.arange(40, device=device)
    columns = (settings.temperature, settings.is_greedy, settings.seed, index)
    tokens, log_probs = draw_tokens(logits, *columns)
    assert (tokens == 4500).all()
    assert (log_probs == 0).all()
    logits[3, 7] = torch.nan
    _, log_probs = draw_tokens(logits, *columns)
    assert log_probs[3].isnan()
    assert log_probs[[0, 39]].isfinite().all()


@on_each_device
@pytest.mark.parametrize("options", [{}, {"scale": 0.7, "softcap": 3.0}])
def test_a_drawn_tokens_log_prob_has_the_bits_that_training_finds(device, options):
    from verl.models.kernels.log_probs import logits_log_probs
    from verl.models.kernels.sampling import draw_tokens

    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(10, 9001, generator=generator)).to(device, torch.bfloat16)
    temperature = torch.linspace(0.5, 1.5, 11, device=device)[:10]  # one of them is 1
    settings = settings_of([SamplingParams()] * 10, device)
    index = torch.arange(10, device=device)
    tokens, drawn = draw_tokens(
        logits, temperature, settings.is_greedy, settings.seed, index, **options
    )
    scoring = {"scale": 1.0, "softcap": None, **options}
    trained, _, _ = logits_log_probs(logits, tokens, temperature=temperature, **scoring)
    assert (temperature == 1).any()
    assert torch.equal(drawn, trained)
