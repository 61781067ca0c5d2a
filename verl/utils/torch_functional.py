"""Tensor helpers: masked statistics, log-probabilities, padding, learning-rate schedules.

Masked statistics ignore everything outside the mask, NaN included, never divide by zero and never
copy a count back from the device. Log-probabilities and entropies are computed in float32, in
chunks of rows, so a float32 copy of all logits never exists; `logits[:, t]` scores
`input_ids[:, t + 1]`. A schedule is a plain function of the step, so a resumed run continues on the
same curve; past the last training step its factor stays constant.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.utils.distributed import (
    allgather_dict_tensors as allgather_dict_tensors,
)
from verl.utils.distributed import (
    broadcast_dict_tensor as broadcast_dict_tensor,
)
from verl.utils.distributed import (
    distributed_masked_mean as distributed_masked_mean,
)
from verl.utils.distributed import (
    distributed_mean_max_min_std as distributed_mean_max_min_std,
)
from verl.utils.distributed import (
    split_dict_tensor_into_batches as split_dict_tensor_into_batches,
)
from verl.utils.tensor_rows import BatchError, jagged, offsets_of, open_jagged


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Element by element into [`tensor_min`, `tensor_max`]; the limits may be tensors."""
    return torch.clamp(x, tensor_min, tensor_max)


Axis = int | tuple[int, ...] | None


def masked_sum(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """Sum of `values * mask`; where the mask is 0 the value is not looked at."""
    kept = torch.where(mask.bool(), values, 0) * mask
    return kept.sum() if axis is None else kept.sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """`masked_sum / (sum(mask) + 1e-8)`: an empty mask gives 0, not NaN."""
    count = mask.sum() if axis is None else mask.sum(axis)
    return masked_sum(values, mask, axis) / (count + 1e-8)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance over all kept positions, with Bessel's correction n / (n - 1) if `unbiased`.

    Fewer than two kept values have no spread: their variance is 0.
    """
    squares = (values - masked_mean(values, mask)) ** 2
    variance = masked_mean(squares, mask)
    if not unbiased:
        return variance
    count = mask.sum()
    correction = count / (count - 1).clamp(min=1)
    return torch.where(count > 1, variance * correction, torch.zeros_like(variance))


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Give the kept values mean 0 and variance 1; without `shift_mean` the mean is kept.

        (x - mean) / sqrt(var + 1e-8)   [+ mean]        var is unbiased

    A single kept value is its own mean, so it whitens to 0 (to itself without `shift_mean`).
    Positions outside the mask hold numbers of no meaning.
    """
    mean, variance = masked_mean(values, mask), masked_var(values, mask)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    whitened = torch.where(mask.sum() > 1, whitened, torch.zeros_like(whitened))
    return whitened if shift_mean else whitened + mean


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


def _chunks(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.split(_rows_per_chunk(rows))


def _rows_per_chunk(rows: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // rows.shape[-1])


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


def get_response_mask(
    response_id: Tensor, eos_token: int | list[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 up to and including the first end-of-sequence token, then 0: (B, T) -> (B, T).

    The end token is part of the answer (it must be learned); a row without one is kept whole.
    """
    is_end = torch.isin(response_id, torch.tensor(eos_token, device=response_id.device)).long()
    ends_before = is_end.cumsum(-1) - is_end
    return (ends_before == 0).to(dtype)


get_eos_mask = get_response_mask


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """One row per list, padded on the right to the longest list, or to `max_length` if longer."""
    length = max([max_length or 0, *map(len, response)])
    return torch.tensor([[*row, *[pad_token_id] * (length - len(row))] for row in response])


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> Tensor:
    """Pad the last dimension to `max_seq_len`; what is that long already is returned as it is."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    return functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Bring (B, L) ids and mask to exactly `max_length`: pad what is short, cut what is long.

    `truncation` names the side that is lost: "left", "right", "middle" (the first half and the
    last half stay), or "error" to refuse.
    """
    if truncation not in ("error", *_KEPT):
        known = ", ".join(["error", *_KEPT])
        raise ValueError(f"truncation is {truncation!r}; it must be one of: {known}")
    if input_ids.shape != attention_mask.shape or input_ids.ndim != 2:
        raise ValueError(
            f"input_ids {tuple(input_ids.shape)} and attention_mask "
            f"{tuple(attention_mask.shape)} must have one shape (rows, tokens)"
        )
    length = input_ids.shape[-1]
    if length > max_length:
        if truncation == "error":
            raise ValueError(
                f"a sequence of {length} tokens is longer than max_length {max_length}; raise the "
                "limit, filter such rows, or set truncation to left, right or middle"
            )
        keep = _KEPT[truncation]
        return keep(input_ids, max_length), keep(attention_mask, max_length)
    return (
        pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
        pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
    )


def _keep_ends(rows: Tensor, max_length: int) -> Tensor:
    head = max_length // 2
    return torch.cat([rows[:, :head], rows[:, rows.shape[-1] - (max_length - head) :]], dim=-1)


_KEPT: dict[str, Callable[[Tensor, int], Tensor]] = {
    "left": lambda rows, max_length: rows[:, rows.shape[-1] - max_length :],
    "right": lambda rows, max_length: rows[:, :max_length],
    "middle": _keep_ends,
}


def tokenize_and_postprocess_data(
    prompt: str,
    tokenizer: Any,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Tokenize text that carries its special tokens, then `postprocess_data`: two (1, L)."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(
        encoded["input_ids"],
        encoded["attention_mask"],
        max_length,
        pad_token_id,
        left_pad=left_pad,
        truncation=truncation,
    )


def remove_pad_token(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """The real tokens of each row, as lists."""
    return [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


def expand_as_nested(tensor: Tensor, nested_tensor: Tensor) -> Tensor:
    """Give each token of a jagged tensor (B, j) its sequence's value: (B,) -> jagged (B, j)."""
    if not nested_tensor.is_nested or nested_tensor.layout != torch.jagged:
        raise BatchError("expand_as_nested needs a nested tensor with layout torch.jagged")
    if tensor.ndim != 1 or nested_tensor.ndim != 2:
        raise BatchError(
            f"expand_as_nested spreads values (B,) over a nested tensor (B, j), got "
            f"{tuple(tensor.shape)} and {nested_tensor.ndim} dims"
        )
    if tensor.shape[0] != nested_tensor.shape[0]:
        raise BatchError(
            f"{tensor.shape[0]} values cannot be spread over {nested_tensor.shape[0]} sequences"
        )
    parts = open_jagged(nested_tensor)
    values = tensor.repeat_interleave(parts.row_lengths, dim=0)
    return jagged(values, offsets_of(parts.row_lengths), dim=1)


def kept_tokens(ids: Tensor, mask: Tensor) -> list[np.ndarray]:
    """For each row of `ids` (B, T) the entries where `mask` is set.

    All rows are taken at once, which is several times as fast as one after the other. Tokenizers
    decode arrays faster than lists, whose entries they look at one by one.
    """
    is_kept = mask.bool()
    ends = np.cumsum(is_kept.sum(1).tolist(), dtype=np.int64).tolist()
    tokens = ids[is_kept].cpu().numpy()
    return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


Curve = Callable[[float], float]
"""Progress after the warm-up (0 to 1) -> share of the way from the minimum (0) to the peak (1)."""


def get_constant_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    last_epoch: int = -1,
    zero_indexed_step: bool = True,
) -> LambdaLR:
    """Linear from 0 to the full rate over `num_warmup_steps`, then constant."""
    factor = _factor(lambda _: 1.0, num_warmup_steps, None, zero_indexed_step=zero_indexed_step)
    return LambdaLR(optimizer, factor, last_epoch)


def get_linear_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    last_epoch: int = -1,
    zero_indexed_step: bool = True,
) -> LambdaLR:
    """After the warm-up a straight line to `min_lr_ratio` of the rate at the last step."""
    steps, ratios = (num_warmup_steps, num_training_steps), (min_lr_ratio, None)
    factor = _factor(lambda t: 1 - t, *steps, *ratios, zero_indexed_step)
    return LambdaLR(optimizer, factor, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    init_lr_ratio: float | None = None,
    zero_indexed_step: bool = True,
) -> LambdaLR:
    """After the warm-up follow a cosine between the full rate and `min_lr_ratio` of it.

        factor = min + (1 - min) * (1 + cos(2 pi num_cycles t)) / 2        t: progress, 0 to 1

    Starts at `init_lr_ratio` of the rate, or 0; with `zero_indexed_step` the first step is step 0.
    """
    steps, ratios = (num_warmup_steps, num_training_steps), (min_lr_ratio, init_lr_ratio)
    factor = _factor(_cosine(num_cycles), *steps, *ratios, zero_indexed_step)
    return LambdaLR(optimizer, factor, last_epoch)


def get_wsd_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> LambdaLR:
    """Warm up, stay, decay (arXiv:2404.06395): constant for `stable_ratio` of the steps after the
    warm-up, then the cosine of `get_cosine_schedule_with_warmup` over the rest."""
    if not 0 <= stable_ratio <= 1:
        raise ValueError(f"stable_ratio is {stable_ratio}; it must lie between 0 and 1")
    decay = _cosine(num_cycles)

    def curve(t: float) -> float:
        return 1.0 if t <= stable_ratio else decay((t - stable_ratio) / (1 - stable_ratio))

    factor = _factor(curve, num_warmup_steps, num_training_steps, min_lr_ratio)
    return LambdaLR(optimizer, factor, last_epoch)


def _cosine(num_cycles: float) -> Curve:
    return lambda t: (1 + math.cos(2 * math.pi * num_cycles * t)) / 2


def _factor(
    curve: Curve,
    num_warmup_steps: int,
    num_training_steps: int | None,
    min_lr_ratio: float = 0.0,
    init_lr_ratio: float | None = None,
    zero_indexed_step: bool = True,
) -> Callable[[int], float]:
    start = init_lr_ratio or 0.0
    for name, ratio in ("min_lr_ratio", min_lr_ratio), ("init_lr_ratio", start):
        if not 0 <= ratio <= 1:
            raise ValueError(f"{name} is {ratio}; it must lie between 0 and 1")

    def factor(step: int) -> float:
        step += not zero_indexed_step
        if step < num_warmup_steps:
            return start + (1 - start) * step / num_warmup_steps
        if num_training_steps is None:
            return 1.0
        remaining = max(1, num_training_steps - num_warmup_steps)
        progress = min(1.0, (step - num_warmup_steps) / remaining)
        return min_lr_ratio + (1 - min_lr_ratio) * curve(progress)

    return factor
