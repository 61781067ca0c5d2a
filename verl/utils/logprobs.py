"""From logits to log-probabilities and entropies, in float32 whatever the logits are.

The vocabulary is large, so a float32 copy of all logits is never made: rows are worked off in
chunks, forwards and backwards, and only one number per row is kept in between. These functions are
the plain reference; they also say how logits and tokens line up: `logits[:, t]` scores
`input_ids[:, t + 1]`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_CHUNK_ELEMENTS = 2**25  # 128 MiB of float32 at a time


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """log softmax(logits)[label] in float32: logits (..., V), labels (...) -> (...).

    With `inplace_backward` the gradient is written over the logits, which saves a tensor of their
    size: after `backward` they hold no logits any more, and another function that still needs them
    makes autograd raise. Logits that are themselves leaves are never overwritten.
    """
    _check_aligned(logits, labels)
    rows = logits.reshape(-1, logits.shape[-1])
    overwrite = inplace_backward and not logits.is_leaf
    return _LogProb.apply(rows, labels.reshape(-1), overwrite).view(labels.shape)  # pyright: ignore


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats, in float32: (..., V) -> (...)."""
    rows = logits.reshape(-1, logits.shape[-1])
    return _Entropy.apply(rows, _rows_per_chunk(rows)).view(logits.shape[:-1])  # pyright: ignore


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """`entropy_from_logits` with `chunk_size` rows at a time."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; at least one row must fit a chunk")
    rows = logits.reshape(-1, logits.shape[-1])
    return _Entropy.apply(rows, chunk_size).view(logits.shape[:-1])  # pyright: ignore


def calculate_sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Sum over the vocabulary of p^2, without gradient: (..., V) -> (...), in float32."""
    rows = logits.detach().reshape(-1, logits.shape[-1])
    parts = [chunk.float().softmax(-1).square().sum(-1) for chunk in _chunks(rows)]
    return torch.cat(parts).view(logits.shape[:-1])


def log_probs_from_logits_response(
    input_ids: Tensor, logits: Tensor, response_length: int
) -> Tensor:
    """Log-probs of the last `response_length` tokens: ids (B, L), logits (B, L, V) -> (B, T)."""
    _check_aligned(logits, input_ids)
    _check_response_length(response_length, input_ids.shape[1])
    response = input_ids[:, -response_length:]
    return logprobs_from_logits(logits[:, -response_length - 1 : -1], response)


def log_probs_from_logits_response_rmpad(
    input_ids: Tensor, attention_mask: Tensor, logits_rmpad: Tensor, response_length: int
) -> Tensor:
    """`log_probs_from_logits_response` for packed logits: (B, L), (B, L), (N, V) -> (B, T).

    The N rows are the tokens that `attention_mask` keeps, in order. Padding in the response gets 0.
    """
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} and input_ids "
            f"{tuple(input_ids.shape)} must have one shape"
        )
    indices = attention_mask.reshape(-1).nonzero().squeeze(-1)
    return log_probs_from_logits_all_rmpad(
        input_ids.reshape(-1)[indices],
        logits_rmpad,
        indices,
        batch_size=input_ids.shape[0],
        seqlen=input_ids.shape[1],
        response_length=response_length,
    )


def log_probs_from_logits_all_rmpad(
    input_ids_rmpad: Tensor,
    logits_rmpad: Tensor,
    indices: Tensor,
    batch_size: int,
    seqlen: int,
    response_length: int,
) -> Tensor:
    """The same when the ids are packed too: (N,) or (1, N), (N, V) or (1, N, V) -> (B, T).

    `indices` (N,) says where each packed token stands in the flattened (B, L).
    """
    ids, logits = input_ids_rmpad.reshape(-1), logits_rmpad.reshape(-1, logits_rmpad.shape[-1])
    _check_aligned(logits, ids)
    _check_aligned(logits, indices)
    _check_response_length(response_length, seqlen)
    # A sequence's last row is scored against its neighbour's first token; it lands on padding or
    # beyond the end, where `is_token` or the shift below drops it.
    scored = logprobs_from_logits(logits, ids.roll(-1))  # (N,)
    padded = scored.new_zeros(batch_size * seqlen).scatter(0, indices, scored)
    is_token = torch.zeros_like(padded, dtype=torch.bool).scatter(0, indices, True)
    padded, is_token = padded.view(batch_size, seqlen), is_token.view(batch_size, seqlen)
    return padded[:, -response_length - 1 : -1] * is_token[:, -response_length:]


class _LogProb(Function):
    """d logp / d logits = onehot(label) - softmax(logits)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, overwrite: bool) -> Tensor:
        normalizer = _logsumexp(logits)
        ctx.save_for_backward(logits, labels, normalizer)
        ctx.overwrite = overwrite
        return logits.gather(-1, labels[:, None]).squeeze(-1).float() - normalizer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        logits, labels, normalizer = ctx.saved_tensors
        target = logits if ctx.overwrite else torch.empty_like(logits)
        start = 0
        for chunk in _chunks(logits):
            rows = slice(start, start + len(chunk))
            probability = torch.exp(chunk.float() - normalizer[rows, None])
            slope = probability.mul_(-grad[rows, None])
            slope.scatter_add_(-1, labels[rows, None], grad[rows, None])
            target[rows] = slope.to(logits.dtype)
            start = rows.stop
        return target, None, None


class _Entropy(Function):
    """H = -sum p log p; d H / d logits = -p (log p + H). A token of probability 0 adds nothing."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_rows: int) -> Tensor:
        parts = [
            torch.special.entr(chunk.float().softmax(-1)).sum(-1)
            for chunk in logits.split(num_rows)
        ]
        entropy = torch.cat(parts)
        ctx.save_for_backward(logits, entropy)
        ctx.num_rows = num_rows
        return entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        logits, entropy = ctx.saved_tensors
        target = torch.empty_like(logits)
        pieces = (item.split(ctx.num_rows) for item in (logits, entropy, grad, target))
        for chunk, h, g, out in zip(*pieces, strict=True):
            p = chunk.float().softmax(-1)
            out.copy_((torch.special.entr(p) - p * h[:, None]) * g[:, None])
        return target, None


def _logsumexp(rows: Tensor) -> Tensor:
    return torch.cat([chunk.float().logsumexp(-1) for chunk in _chunks(rows)])


def _chunks(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.split(_rows_per_chunk(rows))


def _rows_per_chunk(rows: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // rows.shape[-1])


def _check_aligned(logits: Tensor, labels: Tensor) -> None:
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} and tokens {tuple(labels.shape)} do not line up: there "
            "must be one row of logits per token. A model that expands its input (images) needs "
            "its ids expanded too"
        )


def _check_response_length(response_length: int, seqlen: int) -> None:
    if not 0 < response_length < seqlen:
        raise ValueError(
            f"response_length is {response_length}; it must be at least 1 and, since the first "
            f"token is never predicted, less than the sequence length {seqlen}"
        )
