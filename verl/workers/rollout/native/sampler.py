"""Which token comes next, for many sequences at once, each with its own settings.

One uniform number per token, made from (seed, token index) by a hash, picks the token from the
cumulative distribution. A sequence's tokens therefore depend on its seed and its logits, not on
when it runs or beside whom. Filters change what may be picked. A row's log-probability is that of
what it may pick from (`renormalizes`), or that of the whole distribution, which training computes.

Everything works on weights, exp(score - largest score), which are 1 for the likeliest token: they
give the log-sum-exp, the filters are thresholds on them, and their sums give the distribution.

Ranks that hold one model together run the same requests with the same seeds; what the first of them
draws holds for all (`as_on_first_rank`), so that all of them decide alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from verl.utils.device import without_waiting
from verl.utils.scramble import uniform
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.native.rows import RowSettings
from verl.workers.rollout.native.scheduler import Move
from verl.workers.rollout.native.sequence import Sample

LARGEST_UNIFORM = 1 - 2.0**-52

CHUNK = 128
"""Tokens whose weights are added up in fp32 before fp64 takes over: a cumulative sum over the whole
vocabulary in fp32 would lose its unlikely tokens, and one in fp64 takes several times as long."""

FIRST_CANDIDATES = 64
"""How many of the likeliest tokens top-p looks at first; few distributions need more."""


@dataclass(frozen=True)
class Needs:
    """What any of the rows asks for; the rest costs nothing. A row that does not ask for it gets
    the same token either way."""

    temperature: bool
    greedy: bool
    draw: bool
    candidates: bool
    min_p: bool
    penalty: bool
    renormalizes: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "Needs":
        return cls(
            temperature=any(p.temperature not in (0, 1) for p in params),
            greedy=any(p.temperature == 0 for p in params),
            draw=any(p.temperature != 0 for p in params),
            candidates=any(p.top_k > 0 or p.top_p < 1 for p in params),
            min_p=any(p.min_p > 0 for p in params),
            penalty=any(p.repetition_penalty != 1 for p in params),
            renormalizes=any(p.renormalizes for p in params),
        )


def next_tokens(
    logits: Tensor,
    settings: RowSettings,
    needs: Needs,
    token_indices: Tensor,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Pick a token for each row of `logits` (B, V), which are raw: not yet divided by temperature.

    Gives token ids (B,) and their log-probabilities (B,). `token_indices` (B,) counts the tokens
    that each response has already. `seen` (B, V) marks the tokens of prompt and response so far; it
    is needed where a repetition penalty applies.
    """
    scaled = logits / settings.temperature[:, None] if needs.temperature else logits
    weights, log_sum = weights_and_log_sum(scaled)
    scores = scaled
    if needs.penalty:
        assert seen is not None
        scores = penalised(logits, settings, seen) / settings.temperature[:, None]
        weights, _ = weights_and_log_sum(scores)
    weights = kept_weights(weights, settings, needs)
    tokens = pick(scores, weights, settings, needs, token_indices)
    log_probs = scaled.gather(1, tokens[:, None]).squeeze(1) - log_sum
    if needs.renormalizes:
        among_kept = scores.gather(1, tokens[:, None]).squeeze(1) - scores.amax(-1)
        among_kept -= weights.double().sum(-1).log_().to(among_kept.dtype)
        log_probs = torch.where(settings.renormalizes, among_kept, log_probs)
    return tokens, log_probs


def weights_and_log_sum(scores: Tensor) -> tuple[Tensor, Tensor]:
    """exp(score - largest), (B, V), and the log-sum-exp of the scores, (B,).

    The same operations as `Tensor.logsumexp`, to the last bit, but the weights are kept.
    """
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp_()
    return weights, weights.sum(-1).log_() + largest.squeeze(1)


def penalised(logits: Tensor, settings: RowSettings, seen: Tensor) -> Tensor:
    """Logits, those of tokens seen before divided by the penalty, or multiplied if negative."""
    penalty = settings.repetition_penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def pick(
    scores: Tensor, weights: Tensor, settings: RowSettings, needs: Needs, token_indices: Tensor
) -> Tensor:
    """The likeliest token of greedy rows, else one drawn by the weights that are left."""
    if not needs.draw:
        return scores.argmax(-1)
    tokens = draw(weights, uniform(settings.seed, token_indices))
    return torch.where(settings.is_greedy, scores.argmax(-1), tokens) if needs.greedy else tokens


def kept_weights(weights: Tensor, settings: RowSettings, needs: Needs) -> Tensor:
    """The weights (B, V) with 0 for tokens that a filter takes away."""
    if not needs.draw or not (needs.candidates or needs.min_p):
        return weights
    floor = settings.min_p
    if needs.candidates:
        floor = floor.maximum(smallest_candidate(weights, settings.top_k, settings.top_p))
    return weights.masked_fill(weights < floor[:, None], 0.0)


def smallest_candidate(
    weights: Tensor, top_k: Tensor, top_p: Tensor, num_candidates: int = FIRST_CANDIDATES
) -> Tensor:
    """The weight of the unlikeliest token that top-k, then top-p of the rest, let through; (B,).

    Tokens as likely as that one pass as well, so equal weights are treated equally. Only the
    `num_candidates` likeliest are sorted, and more where these do not settle a row.
    """
    vocabulary = weights.shape[1]
    uses_top_k = (top_k > 0) & (top_k < vocabulary)
    largest_k = int(torch.where(uses_top_k, top_k, 0).max())
    num_candidates = min(max(num_candidates, largest_k), vocabulary)
    likeliest = weights.topk(num_candidates).values  # (B, candidates), the largest first
    limit = torch.where(uses_top_k, top_k, vocabulary)[:, None]
    is_kept = torch.arange(num_candidates, device=weights.device) < limit
    mass = torch.where(is_kept, likeliest, 0.0).double().cumsum(-1)
    total = torch.where(uses_top_k, mass[:, -1], weights.sum(-1).double())
    wanted = torch.where(top_p < 1, top_p * total, torch.inf)[:, None]
    is_kept[:, 1:] &= mass[:, :-1] < wanted  # what lies before it does not reach top-p yet
    smallest = likeliest.gather(1, is_kept.sum(1, keepdim=True) - 1).squeeze(1)
    smallest = torch.where(uses_top_k | (top_p < 1), smallest, 0.0)
    is_open = ~uses_top_k & (top_p < 1) & (mass[:, -1:] < wanted).squeeze(1)
    if num_candidates < vocabulary and bool(is_open.any()):
        smallest[is_open] = smallest_candidate(
            weights[is_open], top_k[is_open], top_p[is_open], 16 * num_candidates
        )
    return smallest


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token at which the cumulative sum of weights (B, V) exceeds uniform x total; (B,).

    First the chunk of the vocabulary, then the token inside it. A token of weight 0 is never drawn.
    """
    num_padding = -weights.shape[1] % CHUNK
    chunks = F.pad(weights, (0, num_padding)) if num_padding else weights
    chunks = chunks.unflatten(1, (-1, CHUNK))
    chunk, fraction = locate(chunks.sum(-1).double(), uniforms)
    inside = chunks.gather(1, chunk[:, None, None].expand(-1, 1, CHUNK)).squeeze(1)
    index, _ = locate(inside.double(), fraction)
    return (chunk * CHUNK + index).clamp_max_(weights.shape[1] - 1)


def locate(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the weight of (B, n) that uniform x sum falls on, and where on it, in [0, 1).

    NaN falls off the end and is put on the last; its log-probability tells.
    """
    ends = weights.cumsum(-1)
    point = uniforms[:, None] * ends[:, -1:]
    index = torch.searchsorted(ends, point, right=True).clamp_max_(weights.shape[1] - 1)
    weight = weights.gather(1, index)
    fraction = (point - ends.gather(1, index) + weight) / weight
    return index.squeeze(1), fraction.clamp(0.0, LARGEST_UNIFORM).squeeze(1)


class SeenTokens:
    """(rows, V), True for tokens of a row's prompt and response; used where a penalty applies."""

    def __init__(self, num_rows: int, vocabulary: int, device: torch.device) -> None:
        self._shape = (num_rows, vocabulary)
        self._device = device
        self._table: Tensor | None = None

    def enter(self, samples: Sequence[Sample]) -> None:
        """Fill the rows of samples that have just been given their slots."""
        for sample in samples:
            if sample.group.request.params.repetition_penalty != 1:
                row = self._whole()[sample.slot]
                row.fill_(False)
                row[without_waiting(torch.tensor(sample.token_ids), self._device)] = True

    def rows(self, rows: slice) -> Tensor:
        """The part of the table for some rows; it may be written to."""
        return self._whole()[rows]

    def move(self, move: Move) -> None:
        if self._table is not None:
            self._table[move.target] = self._table[move.source]

    def _whole(self) -> Tensor:
        if self._table is None:
            self._table = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        return self._table


def as_on_first_rank(
    tokens: Tensor, log_probs: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Token ids and log-probabilities, (B,) each, as the first rank of the group drew them."""
    if group is None:
        return tokens, log_probs
    drawn = torch.stack([tokens.double(), log_probs.double()])  # exact, and one trip
    dist.broadcast(drawn, group=group, group_src=0)
    return drawn[0].to(tokens.dtype), drawn[1].to(log_probs.dtype)
