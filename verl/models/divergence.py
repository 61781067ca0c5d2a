"""A student's distribution beside its teacher's, from the hidden states of both, in chunks of rows.

    rows      hidden states           logits of a chunk            (rows,)
    0..n      student  (n, h)   ->    (chunk, V)   \\
    0..n      teacher  (n, h')  ->    (chunk, V)   /   ->          divergence

As in `verl.models.head`, logits exist for one chunk at a time, in the forward pass and again in the
backward pass: 300 KB a token for each model never add up. The teacher gets no gradient. Two models
with one tokenizer may pad their vocabularies differently; both are compared, each normalised, over
the ids that both have.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from verl.algos.distillation import Divergence, logits_gradient
from verl.models.head import OutputHead, add_product_, row_chunks, scaled_logits


def divergence_to(
    hidden: Tensor,
    head: OutputHead,
    teacher_hidden: Tensor,
    teacher_head: OutputHead,
    divergence: Divergence,
    *,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(rows,) the divergence, differentiable, and whether both find the same token likeliest."""
    return _Divergence.apply(  # pyright: ignore[reportReturnType]
        hidden, head.weight, head.bias, head, teacher_hidden, teacher_head, divergence, temperature
    )


def log_probs_at(
    hidden: Tensor, head: OutputHead, ids: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """log p of K given tokens of each row, (rows, K) for `ids` (rows, K); differentiable."""
    return _LogProbsAt.apply(  # pyright: ignore[reportReturnType]
        hidden, head.weight, head.bias, head, ids, temperature
    )


@torch.no_grad()
def top_log_probs(
    hidden: Tensor, head: OutputHead, k: int, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The ids and log-probabilities of each row's K likeliest tokens, (rows, K), best first."""
    num_rows, k = len(hidden), min(k, len(head.weight))
    ids = torch.empty(num_rows, k, dtype=torch.long, device=hidden.device)
    values = torch.empty(num_rows, k, dtype=torch.float32, device=hidden.device)
    for rows in row_chunks(num_rows, len(head.weight)):
        log_p = scaled_logits(hidden[rows], head, temperature).log_softmax(-1)
        values[rows], ids[rows] = log_p.topk(k, dim=-1)
    return ids, values


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: OutputHead,
        teacher_hidden: Tensor,
        teacher_head: OutputHead,
        divergence: Divergence,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        value = hidden.new_empty(len(hidden), dtype=torch.float32)
        is_same = torch.empty_like(value)
        for rows, log_p, log_q in _pairs(hidden, head, teacher_hidden, teacher_head, temperature):
            value[rows], _ = divergence.full(log_p, log_q)
            is_same[rows] = (log_p.argmax(-1) == log_q.argmax(-1)).float()
        ctx.save_for_backward(hidden, weight, bias, teacher_hidden)
        ctx.settings = head, teacher_head, divergence, temperature
        ctx.mark_non_differentiable(is_same)
        return value, is_same

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, teacher_hidden = ctx.saved_tensors
        head, teacher_head, divergence, temperature = ctx.settings
        sums = _HeadGradient(hidden, weight, bias, is_trained=ctx.needs_input_grad[1])
        for rows, log_p, log_q in _pairs(hidden, head, teacher_hidden, teacher_head, temperature):
            _, gradient = divergence.full(log_p, log_q)
            gradient = logits_gradient(log_p, gradient).mul_(gradients[0][rows, None])
            sums.add(rows, through_scores(gradient, hidden[rows], head, temperature))
        return *sums.results(), None, None, None, None, None


class _LogProbsAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: OutputHead,
        ids: Tensor,
        temperature: float,
    ) -> Tensor:
        chosen = torch.empty(ids.shape, dtype=torch.float32, device=hidden.device)
        for rows in row_chunks(len(hidden), len(weight)):
            z = scaled_logits(hidden[rows], head, temperature)
            chosen[rows] = z.gather(1, ids[rows]) - z.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.settings = head, temperature
        return chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids = ctx.saved_tensors
        head, temperature = ctx.settings
        sums = _HeadGradient(hidden, weight, bias, is_trained=ctx.needs_input_grad[1])
        for rows in row_chunks(len(hidden), len(weight)):
            given = gradients[0][rows]
            p = scaled_logits(hidden[rows], head, temperature).softmax(-1)
            gradient = p.mul_(-given.sum(-1, keepdim=True)).scatter_add_(1, ids[rows], given)
            sums.add(rows, through_scores(gradient, hidden[rows], head, temperature))
        return *sums.results(), None, None, None


class _HeadGradient:
    """Gradients of hidden states, output layer and bias, added up chunk by chunk."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, is_trained: bool
    ) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._of_hidden = torch.empty_like(hidden)
        self._of_weight = torch.zeros_like(weight, dtype=torch.float32) if is_trained else None
        self._of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)

    def add(self, rows: slice, gradient: Tensor) -> None:
        """`gradient` is that of the raw logits of a chunk; of the first ids only if the teacher
        has fewer."""
        gradient = gradient.to(self._hidden.dtype)
        size = gradient.shape[1]
        self._of_hidden[rows] = gradient @ self._weight[:size]
        if self._of_weight is not None:
            add_product_(self._of_weight[:size], gradient.t(), self._hidden[rows])
        if self._of_bias is not None:
            self._of_bias[:size] += gradient.sum(0, dtype=torch.float32)

    def results(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        weight, bias = self._of_weight, self._of_bias
        return (
            self._of_hidden,
            None if weight is None else weight.to(self._weight.dtype),
            None if bias is None or self._bias is None else bias.to(self._bias.dtype),
        )


def through_scores(
    gradient: Tensor, hidden: Tensor, head: OutputHead, temperature: float
) -> Tensor:
    """From the gradient of scaled logits to that of raw ones: through temperature, soft cap, scale.

    The soft cap needs the logits once more."""
    if head.softcap is not None:
        z = scaled_logits(hidden, head, temperature)[:, : gradient.shape[1]]
        gradient = gradient * (1 - (z * temperature / head.softcap).square())
    factor = head.scale / temperature
    return gradient if factor == 1 else gradient * factor


def _pairs(
    hidden: Tensor,
    head: OutputHead,
    teacher_hidden: Tensor,
    teacher_head: OutputHead,
    temperature: float,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Chunks of rows with the log-probabilities of both models, (chunk, V), in fp32."""
    largest = max(len(head.weight), len(teacher_head.weight))
    shared = min(len(head.weight), len(teacher_head.weight))
    for rows in row_chunks(len(hidden), largest):
        own = scaled_logits(hidden[rows], head, temperature)[:, :shared]
        other = scaled_logits(teacher_hidden[rows], teacher_head, temperature)[:, :shared]
        yield rows, own.log_softmax(-1), other.log_softmax(-1)
