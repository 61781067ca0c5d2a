"""From hidden states to the log-probability of given tokens, without keeping the logits.

The logits of a batch are its largest tensor by far ([tokens, vocabulary]). Here they exist for one
chunk of rows at a time, in the forward pass and again in the backward pass; where kernels write
the gradient over them, those of the first chunks stay as they are in between. Training, the frozen
reference and the sampler all start from `raw_logits` and score them by one rule, so temperature,
soft cap and precision are the same wherever a log-probability is computed. On a GPU Triton kernels
read the logits in the dtype they have; elsewhere plain torch works on an fp32 copy.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from verl.models.exact import ROWS, exact_capacity, exact_linear
from verl.models.kernels.availability import can_run_triton
from verl.utils.device import memory_info

WORKSPACE_ELEMENTS = 1 << 26
"""Logits that plain torch may hold at once: 256 MiB in fp32, and as much for each step of the
formula. The kernels hold no such copies and take seven times the rows."""


KEPT_SHARE = 16
"""One part in so many of a device's memory may hold logits until the backward pass."""


ROW_MULTIPLE = 256
"""Rows of a chunk; matrix products over other numbers of rows take up to a tenth longer."""


FEWEST_ROWS = 8


@dataclass(frozen=True)
class OutputHead:
    """The last linear layer and what its model does to the logits after it."""

    weight: Tensor
    """(V, hidden); the embedding itself where the two are tied."""

    bias: Tensor | None = None

    softcap: float | None = None
    """Logits become `softcap * tanh(logits / softcap)` (Gemma 2)."""

    scale: float = 1.0
    """Factor on the logits (Cohere multiplies, Granite divides)."""

    is_exact: bool = False
    """Whether rows go through it in tiles, each of one shape."""

    @classmethod
    def of(cls, model: nn.Module) -> "OutputHead":
        layer = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
        if not isinstance(layer, nn.Linear):
            raise ValueError(
                f"{type(model).__name__} has {type(layer).__name__} as its output layer; "
                "only models that end in a linear layer over the vocabulary can be trained"
            )
        options = model.config.to_dict()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        scale = float(options.get("logit_scale") or 1.0) / float(
            options.get("logits_scaling") or 1.0
        )
        softcap = options.get("final_logit_softcapping")
        return cls(layer.weight, layer.bias, softcap, scale, exact_capacity(model) is not None)


def raw_logits(hidden: Tensor, head: OutputHead) -> Tensor:
    """What the output layer gives, in its dtype; (rows, V) for hidden states (rows, hidden)."""
    if not head.is_exact:
        # A product with a single row takes other code and rounds differently.
        num_missing = max(0, FEWEST_ROWS - len(hidden)) if hidden.is_cuda else 0
        padded = nn.functional.pad(hidden, (0, 0, 0, num_missing)) if num_missing else hidden
        return nn.functional.linear(padded, head.weight, head.bias)[: len(hidden)]
    padded = nn.functional.pad(hidden, (0, 0, 0, -len(hidden) % ROWS))
    return exact_linear(padded, head.weight, head.bias)[: len(hidden)]


def scaled_logits(hidden: Tensor, head: OutputHead, temperature: float) -> Tensor:
    """fp32 logits divided by the temperature; (rows, V) for hidden states (rows, hidden)."""
    return scores(raw_logits(hidden, head), head, temperature)


def scores(logits: Tensor, head: OutputHead, temperature: float) -> Tensor:
    """softcap(logits * scale) / temperature in fp32."""
    z = logits.float()
    if head.scale != 1:
        z = z * head.scale
    if head.softcap is not None:
        num_rows = len(z)
        if head.is_exact:  # tanh takes other code for the last elements of an odd-sized tensor
            z = nn.functional.pad(z, (0, 0, 0, -num_rows % ROWS))
        z = head.softcap * torch.tanh(z / head.softcap)[:num_rows]
    return z if temperature == 1 else z / temperature


def token_log_probs(
    hidden: Tensor, head: OutputHead, targets: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of the distribution, both (rows,) in fp32, differentiable.

    log p(t) = z_t - logsumexp(z)        H = logsumexp(z) - sum_v p_v z_v        z = logits / T
    """
    if hidden.shape[:1] != targets.shape:
        raise ValueError(
            f"{hidden.shape[0]} hidden states and {tuple(targets.shape)} targets; there must be "
            "one target for each hidden state"
        )
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probabilities need one above 0")
    return _TokenLogProbs.apply(  # pyright: ignore[reportReturnType]
        hidden, head.weight, head.bias, targets, head, temperature, torch.is_grad_enabled()
    )


@torch.no_grad()
def sum_squared_probs(hidden: Tensor, head: OutputHead, *, temperature: float = 1.0) -> Tensor:
    """sum_v p_v^2 of each row's distribution, (rows,) in fp32: the chance that two draws agree."""
    result = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    for rows in row_chunks(hidden.shape[0], head.weight.shape[0]):
        z = scaled_logits(hidden[rows], head, temperature)
        result[rows] = z.softmax(-1).square().sum(-1)
    return result


def row_chunks(num_rows: int, vocabulary: int, *, num_workspaces: int = 1) -> list[slice]:
    """Cut the rows so that one chunk's logits fit the workspace."""
    size = num_workspaces * WORKSPACE_ELEMENTS // vocabulary
    size = max(16, size - size % ROW_MULTIPLE if size > ROW_MULTIPLE else size)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: OutputHead,
        temperature: float,
        is_differentiated: bool,
    ) -> tuple[Tensor, Tensor]:
        log_prob = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        log_sum, mean = torch.empty_like(log_prob), torch.empty_like(log_prob)
        kept: dict[int, Tensor] = {}
        bytes_left = kept_bytes(hidden.device) if is_differentiated else 0
        for rows in scoring_chunks(hidden, weight.shape[0]):
            logits = raw_logits(hidden[rows], head)
            log_prob[rows], log_sum[rows], mean[rows] = logit_statistics(
                logits, targets[rows], head, temperature
            )
            if logits.nbytes <= bytes_left:
                bytes_left -= logits.nbytes
                kept[rows.start] = logits
        ctx.save_for_backward(hidden, weight, bias, targets, log_sum, mean)
        ctx.head, ctx.temperature, ctx.kept = head, temperature, kept
        return log_prob, log_sum - mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_entropy = gradients
        hidden, weight, bias, targets, log_sum, mean = ctx.saved_tensors
        head, temperature = ctx.head, ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        is_trained = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if is_trained else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for rows in scoring_chunks(hidden, weight.shape[0]):
            logits = ctx.kept.pop(rows.start, None)  # once: the gradient is written over them
            if logits is None:
                logits = raw_logits(hidden[rows], head)
            vectors = (x[rows] for x in (targets, log_sum, mean, grad_log_prob, grad_entropy))
            grad = gradient_of_logits(logits, *vectors, head=head, temperature=temperature)
            grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                add_product_(grad_weight, grad.t(), hidden[rows])
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
        grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b with an fp32 total, without rounding the product to the dtype of a and b."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def logit_statistics(
    logits: Tensor, targets: Tensor, head: OutputHead, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), logsumexp(z) and sum_v p_v z_v of each row, in fp32.

    A target of -1 is in another rank's part of the vocabulary; its log p means nothing.
    """
    if can_run_triton(logits.device):
        from verl.models.kernels.log_probs import logits_log_probs  # noqa: PLC0415 - needs triton

        return logits_log_probs(
            logits, targets, temperature=temperature, scale=head.scale, softcap=head.softcap
        )
    z = scores(logits, head, temperature)
    log_sum = z.logsumexp(-1)
    log_prob = z.gather(1, targets[:, None].clamp_min(0)).squeeze(1) - log_sum
    return log_prob, log_sum, ((z - log_sum[:, None]).exp() * z).sum(-1)


def gradient_of_logits(
    logits: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    mean: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor,
    *,
    head: OutputHead,
    temperature: float,
) -> Tensor:
    """The gradient with respect to the raw logits, in their dtype; may overwrite them.

    The logit of a target of -1 is not among them.
    """
    if can_run_triton(logits.device):
        from verl.models.kernels.log_probs import logits_gradient_  # noqa: PLC0415 - needs triton

        return logits_gradient_(
            logits, targets, log_sum, mean, grad_log_prob, grad_entropy,
            temperature=temperature, scale=head.scale, softcap=head.softcap,
        )  # fmt: skip
    z = scores(logits, head, temperature)
    p = (z - log_sum[:, None]).exp()
    grad = p * (mean[:, None] - z) * grad_entropy[:, None]
    grad -= p * grad_log_prob[:, None]
    is_here = targets >= 0
    grad.scatter_add_(1, targets[:, None].clamp_min(0), (grad_log_prob * is_here)[:, None])
    if head.softcap is not None:
        grad *= 1 - (z * temperature / head.softcap).square()
    return (grad * (head.scale / temperature)).to(logits.dtype)


@cache  # the driver takes its time to answer
def kept_bytes(device: torch.device) -> int:
    """Logits of a pass that may wait for its backward pass; none where they are copied anyway."""
    if device.type != "cuda" or not can_run_triton(device):
        return 0
    return memory_info(device)[1] // KEPT_SHARE


def scoring_chunks(hidden: Tensor, vocabulary: int) -> list[slice]:
    num_workspaces = 7 if can_run_triton(hidden.device) else 1
    return row_chunks(hidden.shape[0], vocabulary, num_workspaces=num_workspaces)


def gather_rows(rows: Tensor, indices: Tensor) -> Tensor:
    """`rows[indices]`. The gradients of a row that is selected several times are added in a fixed
    order, so that the same passes give the same bits; with torch's `index_select` they are added on
    a GPU in the order in which they happen to come."""
    if not rows.is_cuda:
        return rows.index_select(0, indices)
    if rows.dim() == 2 and can_run_triton(rows.device):
        from verl.models.kernels.embedding import embedding  # noqa: PLC0415 - needs triton

        return embedding(indices, rows)
    return rows[indices]
