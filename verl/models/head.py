"""From hidden states to the log-probability of given tokens, without keeping the logits.

The logits of a batch are its largest tensor by far ([tokens, vocabulary]). Here they exist for one
chunk of rows at a time, in the forward pass and again in the backward pass. Training, the frozen
reference and the sampler all go through `scaled_logits`, so temperature, soft cap and precision
are the same wherever a log-probability is computed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl.models.exact import ROWS, exact_capacity, exact_linear

WORKSPACE_ELEMENTS = 1 << 26
"""Logits that may exist at once: 256 MiB in fp32."""


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
    """Whether a row's logits must not depend on the other rows."""

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


def scaled_logits(hidden: Tensor, head: OutputHead, temperature: float) -> Tensor:
    """fp32 logits divided by the temperature; (rows, V) for hidden states (rows, hidden)."""
    num_rows = len(hidden)
    if head.is_exact:
        hidden = nn.functional.pad(hidden, (0, 0, 0, -num_rows % ROWS))
        logits = exact_linear(hidden, head.weight, head.bias).float()
    else:
        logits = nn.functional.linear(hidden, head.weight, head.bias).float()
    if head.scale != 1:
        logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits[:num_rows] if temperature == 1 else logits[:num_rows] / temperature


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
        hidden, head.weight, head.bias, targets, head, temperature
    )


@torch.no_grad()
def sum_squared_probs(hidden: Tensor, head: OutputHead, *, temperature: float = 1.0) -> Tensor:
    """sum_v p_v^2 of each row's distribution, (rows,) in fp32: the chance that two draws agree."""
    result = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    for rows in row_chunks(hidden.shape[0], head.weight.shape[0]):
        z = scaled_logits(hidden[rows], head, temperature)
        result[rows] = z.softmax(-1).square().sum(-1)
    return result


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
    ) -> tuple[Tensor, Tensor]:
        log_prob = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        log_sum, mean = torch.empty_like(log_prob), torch.empty_like(log_prob)
        for rows in row_chunks(hidden.shape[0], weight.shape[0]):
            z = scaled_logits(hidden[rows], head, temperature)
            log_sum[rows] = z.logsumexp(-1)
            log_prob[rows] = z.gather(1, targets[rows, None]).squeeze(1) - log_sum[rows]
            mean[rows] = ((z - log_sum[rows, None]).exp() * z).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, log_sum, mean)
        ctx.head, ctx.temperature = head, temperature
        return log_prob, log_sum - mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_entropy = gradients
        hidden, weight, bias, targets, log_sum, mean = ctx.saved_tensors
        head, temperature = ctx.head, ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for rows in row_chunks(hidden.shape[0], weight.shape[0]):
            z = scaled_logits(hidden[rows], head, temperature)
            p = (z - log_sum[rows, None]).exp()
            grad = p * (mean[rows, None] - z) * grad_entropy[rows, None]
            grad -= p * grad_log_prob[rows, None]
            grad.scatter_add_(1, targets[rows, None], grad_log_prob[rows, None])
            if head.softcap is not None:
                grad *= 1 - (z * temperature / head.softcap).square()
            grad = (grad * (head.scale / temperature)).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.t() @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None


def row_chunks(num_rows: int, vocabulary: int) -> list[slice]:
    """Cut the rows so that one chunk's logits fit the workspace."""
    size = max(16, WORKSPACE_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
