"""Log-probabilities where each rank of a tensor group has the logits of its part of the vocabulary.

The logits are never gathered. Each rank computes log-sum-exp and mean of the scores over its own
part, and the ranks exchange three numbers per token.

    log Z = log sum_r exp(log Z_r)        mean = sum_r exp(log Z_r - log Z) mean_r
    log p(t) = z_t - log Z                H = log Z - mean

Weights come filled up to a multiple of the ranks; rows past the vocabulary belong to no token and
take no part.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.models.divergence import log_probs_at, top_log_probs
from verl.models.head import (
    OutputHead,
    add_product_,
    gradient_of_logits,
    logit_statistics,
    raw_logits,
    row_chunks,
    scaled_logits,
    scoring_chunks,
    token_log_probs,
)
from verl.utils.distributed import all_reduce_


class VocabularyShard:
    """This rank's rows of the output layer."""

    def __init__(self, weight: Tensor, vocabulary: int, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self.start = dist.get_rank(group) * len(weight)
        self.head = OutputHead(weight[: max(0, vocabulary - self.start)])

    def log_probs(
        self, hidden: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """log p(target) and the entropy, both (rows,) in fp32, differentiable."""
        if self.num_ranks == 1:
            return token_log_probs(hidden, self.head, targets, temperature=temperature)
        return _ShardedLogProbs.apply(  # pyright: ignore[reportReturnType]
            hidden, self.head.weight, targets, self, temperature
        )

    @torch.no_grad()
    def sum_squared_probs(self, hidden: Tensor, temperature: float) -> Tensor:
        """sum_v p_v^2 of each row's distribution, (rows,) in fp32."""
        log_sum, log_square = hidden.new_empty((2, len(hidden)), dtype=torch.float32)
        for rows in row_chunks(len(hidden), len(self.head.weight)):
            z = scaled_logits(hidden[rows], self.head, temperature)
            log_sum[rows], log_square[rows] = z.logsumexp(-1), (2 * z).logsumexp(-1)
        parts = self.gather(torch.stack([log_sum, log_square])).logsumexp(0)
        return (parts[1] - 2 * parts[0]).exp()

    def top(self, hidden: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        self._refuse_parts("the likeliest tokens")
        return top_log_probs(hidden, self.head, k, temperature=temperature)

    def log_probs_at(self, hidden: Tensor, ids: Tensor, temperature: float) -> Tensor:
        self._refuse_parts("log-probabilities of given tokens")
        return log_probs_at(hidden, self.head, ids, temperature=temperature)

    def own(self, targets: Tensor) -> Tensor:
        """Targets as rows of this rank's weight; -1 for those of other ranks."""
        local = targets - self.start
        return torch.where((local >= 0) & (local < len(self.head.weight)), local, -1)

    def gather(self, values: Tensor) -> Tensor:
        """The values of all ranks, stacked."""
        parts = [torch.empty_like(values) for _ in range(self.num_ranks)]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.stack(parts)

    def _refuse_parts(self, what: str) -> None:
        if self.num_ranks > 1:
            raise ValueError(
                f"{what} are asked for, but megatron.tensor_model_parallel_size is "
                f"{self.num_ranks} and no rank has all logits; set it to 1, or use strategy=fsdp"
            )


class _ShardedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: VocabularyShard,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        own, head = shard.own(targets), shard.head
        log_prob, log_sum, mean = hidden.new_empty((3, len(hidden)), dtype=torch.float32)
        for rows in scoring_chunks(hidden, len(weight)):
            log_prob[rows], log_sum[rows], mean[rows] = logit_statistics(
                raw_logits(hidden[rows], head), own[rows], head, temperature
            )
        score = all_reduce_(torch.where(own >= 0, log_prob + log_sum, 0.0), group=shard.group)
        log_sums, means = shard.gather(torch.stack([log_sum, mean])).unbind(1)
        log_sum = log_sums.logsumexp(0)
        mean = ((log_sums - log_sum).exp() * means).sum(0)
        ctx.save_for_backward(hidden, weight, own, log_sum, mean)
        ctx.head, ctx.temperature = head, temperature
        return score - log_sum, log_sum - mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The hidden states get the part of this rank's logits; who copied them to the ranks adds
        the parts up."""
        hidden, weight, own, log_sum, mean = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in scoring_chunks(hidden, len(weight)):
            vectors = (x[rows] for x in (own, log_sum, mean, *gradients))
            grad = gradient_of_logits(
                raw_logits(hidden[rows], ctx.head),
                *vectors,
                head=ctx.head,
                temperature=ctx.temperature,
            )
            grad_hidden[rows] = grad @ weight
            add_product_(grad_weight, grad.t(), hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None
