"""Chunks of two output layers against plain torch on all logits at once."""

import pytest
import torch

from verl.algos.distillation import FULL, Divergence
from verl.models.divergence import divergence_to, log_probs_at, top_log_probs
from verl.models.head import OutputHead

VOCABULARY, ROWS = 23, 41
HEADS = {
    "plain": {},
    "scaled": {"scale": 0.5},
    "softcap": {"softcap": 5.0, "scale": 2.0},
}


@pytest.fixture(autouse=True)
def chunks_of_sixteen_rows(monkeypatch):
    monkeypatch.setattr("verl.models.head.WORKSPACE_ELEMENTS", 16 * VOCABULARY)


def layer(width, size, seed, has_bias=True, **options):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, width, generator=generator)
    weight = torch.randn(size, width, generator=generator)
    bias = torch.randn(size, generator=generator) if has_bias else None
    return hidden, OutputHead(weight, bias, **options)


def plain_log_probs(hidden, head, temperature, size):
    z = torch.nn.functional.linear(hidden, head.weight, head.bias) * head.scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return (z / temperature)[:, :size].log_softmax(-1)


def trained(hidden, head):
    return [x.requires_grad_() for x in (hidden, head.weight, head.bias) if x is not None]


def same_gradients(found, expected, inputs):
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    ours = torch.autograd.grad((found * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)
    assert all(one.abs().sum() > 0 for one in ours)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("mode", FULL)
def test_divergence_and_gradient_are_those_of_all_logits(mode, kind):
    hidden, head = layer(8, VOCABULARY, 1, **HEADS[kind])
    teacher_hidden, teacher_head = layer(12, VOCABULARY, 2, has_bias=False)
    divergence = Divergence(mode=mode, jsd_beta=0.3)
    inputs = trained(hidden, head)
    found, same = divergence_to(
        hidden, head, teacher_hidden, teacher_head, divergence, temperature=0.7
    )
    log_p = plain_log_probs(hidden, head, 0.7, VOCABULARY)
    log_q = plain_log_probs(teacher_hidden, teacher_head, 0.7, VOCABULARY)
    expected, _ = divergence.full(log_p, log_q)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert same.tolist() == (log_p.argmax(-1) == log_q.argmax(-1)).float().tolist()
    same_gradients(found, expected, inputs)


@pytest.mark.parametrize("size", [VOCABULARY - 4, VOCABULARY + 4])
def test_vocabularies_that_are_padded_differently_are_compared_where_both_have_ids(size):
    hidden, head = layer(8, VOCABULARY, 1)
    teacher_hidden, teacher_head = layer(12, size, 2)
    divergence = Divergence(mode="reverse_kl_full")
    inputs, shared = trained(hidden, head), min(size, VOCABULARY)
    found, _ = divergence_to(hidden, head, teacher_hidden, teacher_head, divergence)
    expected, _ = divergence.full(
        plain_log_probs(hidden, head, 1.0, shared),
        plain_log_probs(teacher_hidden, teacher_head, 1.0, shared),
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    same_gradients(found, expected, inputs)


@pytest.mark.parametrize("kind", HEADS)
def test_log_probs_at_given_tokens_are_those_of_all_logits(kind):
    hidden, head = layer(8, VOCABULARY, 1, **HEADS[kind])
    ids = torch.randint(VOCABULARY, (ROWS, 5), generator=torch.Generator().manual_seed(3))
    inputs = trained(hidden, head)
    found = log_probs_at(hidden, head, ids, temperature=1.3)
    expected = plain_log_probs(hidden, head, 1.3, VOCABULARY).gather(1, ids)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    same_gradients(found, expected, inputs)


def test_the_likeliest_tokens_come_first_and_are_never_more_than_there_are():
    hidden, head = layer(8, VOCABULARY, 1)
    ids, values = top_log_probs(hidden, head, 4)
    expected = plain_log_probs(hidden, head, 1.0, VOCABULARY).topk(4)
    assert ids.tolist() == expected.indices.tolist()
    torch.testing.assert_close(values, expected.values, rtol=1e-5, atol=1e-5)
    assert top_log_probs(hidden, head, 99)[0].shape == (ROWS, VOCABULARY)
