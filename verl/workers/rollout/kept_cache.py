"""How far tokens drawn over kept keys and values are from what the weights give over fresh ones.

With `rollout.kv_after_update=keep` a response that goes on across updates is continued over keys
and values of older weights. Let q be the distribution that its next token is drawn from, and p that
of the same weights over keys and values computed anew, as training computes them. For tokens drawn
from q, with r = p / q,

    KL(q || p) = E[r - 1 - log r]              never negative, and 0 where both agree
    ESS        = (sum r)^2 / (n sum r^2)       1 where both agree

by age: how many updates the weights that drew a token are ahead of those that drew the first token
of its response. Only tokens of the current version count, since only these weights are at hand.
`measure_step` does it on a sample of the rows of a training step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.workers.rollout.base import TokenOutput
from verl.workers.rollout.trained import Answer

SAMPLED_ROWS = 8


class AgeDrift(NamedTuple):
    """Of the tokens of one age."""

    num_tokens: int
    kl: float
    """Nats per token."""

    max_difference: float
    """Largest |log p - log q|."""

    ess: float
    """Effective sample size as a share, up to 1."""


class KeptCacheError(RuntimeError):
    """Kept keys and values change the policy by more than was allowed."""


@dataclass(frozen=True)
class KeptCacheDrift:
    """The measurement of one sample of rows."""

    by_age: dict[int, AgeDrift]

    @property
    def num_tokens(self) -> int:
        """Tokens that were drawn over older keys and values."""
        return sum(drift.num_tokens for age, drift in self.by_age.items() if age)

    @property
    def kl(self) -> float:
        """Nats per token, over all tokens with an age above 0; 0 if there are none."""
        total = sum(drift.num_tokens * drift.kl for age, drift in self.by_age.items() if age)
        return total / max(1, self.num_tokens)

    def metrics(self) -> dict[str, float]:
        found = {"rollout/kept_kv/kl": self.kl, "rollout/kept_kv/num_tokens": self.num_tokens}
        for age, drift in self.by_age.items():
            found[f"rollout/kept_kv/kl/age_{age}"] = drift.kl
            found[f"rollout/kept_kv/ess/age_{age}"] = drift.ess
        return found

    def require(self, max_kl: float) -> None:
        """Raise `KeptCacheError` if the KL is above `max_kl` nats per token."""
        if self.kl > max_kl:
            ages = "; ".join(
                f"age {age}: KL {drift.kl:.2g}, effective sample size {drift.ess:.3f}, "
                f"{drift.num_tokens} tokens"
                for age, drift in sorted(self.by_age.items())
            )
            raise KeptCacheError(
                f"tokens drawn over kept keys and values are {self.kl:.2g} nats per token from "
                f"what the same weights give over recomputed ones, on {self.num_tokens} tokens "
                f"({ages}); actor_rollout_ref.rollout.kv_max_kl allows {max_kl:g}: set "
                "rollout.kv_after_update=recompute, lower the learning rate, or allow more"
            )


def kept_cache_drift(
    score: Callable[[Sequence[Answer]], list[Tensor]], version: int, rows: Sequence[Answer]
) -> KeptCacheDrift:
    """Compare the log-probs with which `rows` were drawn with those of a pass over whole rows.

    `score` gives the latter, with the weights of `version` and at the temperature of sampling
    (`TrainedPolicy.log_probs`). The rows are responses, or their parts so far, with a version per
    token (-1 for those of tools); filters must have been off.
    """
    rows = [row for row in rows if version in row.output.policy_versions]
    ratios: dict[int, list[float]] = {}
    for row, log_probs in zip(rows, score(rows) if rows else [], strict=True):
        output = row.output
        for drawn_with, drawn, fresh in zip(
            output.policy_versions, output.log_probs, log_probs.tolist(), strict=True
        ):
            if drawn_with == version:
                age = version - next(v for v in output.policy_versions if v >= 0)
                ratios.setdefault(age, []).append(fresh - drawn)
    return KeptCacheDrift({age: _drift(torch.tensor(logs)) for age, logs in ratios.items()})


def measure_step(
    batch: TensorDict,
    score: Callable[[Sequence[Answer]], list[Tensor]],
    version: int,
    *,
    max_kl: float,
) -> dict[str, float]:
    """Metrics of the drift on up to `SAMPLED_ROWS` rows of a batch; raises above `max_kl`.

    Those rows are taken that went on across most updates. `batch` has the columns of training, with
    `rollout_log_probs` and `policy_versions`.
    """
    versions, mask = batch["policy_versions"], batch["attention_mask"].bool()
    newest = (versions == version).any(1)
    oldest = versions.masked_fill(versions < 0, version).amin(1)
    ages = torch.where(newest, version - oldest, -1)
    rows = []
    for index in ages.argsort(descending=True, stable=True)[:SAMPLED_ROWS].tolist():
        if ages[index] > 0:
            width = batch["prompts"].shape[1]
            prompt = batch["prompts"][index][mask[index, :width]]
            length = int(mask[index, width:].sum())
            output = TokenOutput(
                token_ids=batch["responses"][index, :length].tolist(),
                log_probs=batch["rollout_log_probs"][index, :length].tolist(),
                policy_versions=versions[index, :length].tolist(),
            )
            rows.append(Answer(prompt.tolist(), output))
    drift = kept_cache_drift(score, version, rows)
    drift.require(max_kl)
    return drift.metrics()


def _drift(log_ratios: Tensor) -> AgeDrift:
    """`log_ratios` (n,) are log p - log q of tokens of one age."""
    log_ratios = log_ratios.double()
    ratios = log_ratios.exp()
    return AgeDrift(
        num_tokens=len(log_ratios),
        kl=float((ratios - 1 - log_ratios).mean()),
        max_difference=float(log_ratios.abs().max()),
        ess=float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())),
    )
