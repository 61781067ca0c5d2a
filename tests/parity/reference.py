"""What a mini-batch should give: one padded pass of the Hugging Face model, loss written out.

Nothing here comes from the package: transformers' own model with its eager attention and a mask,
all rows at once, log-softmax over the vocabulary, the formulas of the papers, plain autograd.
Adapters are W + (alpha / rank) B A, put into the plain model in place of W.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

TEMPERATURE = 0.8
LEARNING_RATE = 0.25
CLIP, DUAL_CLIP, VALUE_CLIP = 0.2, 3.0, 0.3
ENTROPY_COEFFICIENT, KL_COEFFICIENT = 0.05, 0.3
LARGEST_KL = 10.0  # of one token; beyond it has no gradient


@dataclass(frozen=True)
class Expected:
    """The gradient of every trained parameter, and the metrics of the update."""

    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def expected(
    model: PreTrainedModel,
    trained: Mapping[str, Tensor],
    rows: TensorDict,
    *,
    role: str,
    aggregation: str,
    adapter_scale: float,
) -> Expected:
    """`model` is a plain one; `trained` are all of its weights, or adapters (and a head)."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in trained.items()}
    output = functional_call(
        model,
        merged(leaves, dict(model.named_parameters()), adapter_scale),
        kwargs={
            "input_ids": rows["input_ids"],
            "attention_mask": rows["attention_mask"],
            "position_ids": rows["position_ids"],
            "use_cache": False,
        },
    )
    num_columns = rows["responses"].shape[1]
    logits = output.logits[:, -num_columns - 1 : -1]  # each predicts the token after it
    loss_of = policy_loss if role == "actor" else value_loss
    loss, metrics = loss_of(logits, rows, aggregation)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    metrics |= {
        "grad_norm": norm,
        "lr": LEARNING_RATE,
        "num_optimizer_steps": 1,
        "num_skipped_steps": 0,
        "num_oom_splits": 0,
    }
    return Expected(
        dict(zip(leaves, gradients, strict=True)),
        {f"{role}/{name}": torch.as_tensor(value).item() for name, value in metrics.items()},
    )


def merged(
    leaves: Mapping[str, Tensor], frozen: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """The weights of the plain model as functions of what is trained."""
    weights = {}
    for name, weight in frozen.items():
        layer = name.removesuffix(".weight")
        weights[name] = leaves.get(name, weight.detach())
        if f"{layer}.lora_A.default.weight" in leaves:
            down, up = (leaves[f"{layer}.lora_{factor}.default.weight"] for factor in "AB")
            weights[name] = weight.detach() + scale * up @ down
    return weights


def policy_loss(
    logits: Tensor, rows: TensorDict, aggregation: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO with a dual clip, an entropy bonus, a k3 penalty for leaving the reference policy, and
    cross-entropy on weighted tokens."""
    mask = rows["response_mask"].bool()
    log_p = (logits / TEMPERATURE).log_softmax(-1)  # (B, T, V)
    log_prob = log_p.gather(-1, rows["responses"][..., None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    advantage, log_ratio = rows["advantages"], log_prob - rows["old_log_probs"]
    ratio = log_ratio.exp()
    plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)
    worse = torch.maximum(plain, clipped)
    bound = torch.where(advantage < 0, -advantage * DUAL_CLIP, torch.inf)
    behind = rows["ref_log_prob"] - log_prob
    kl = (torch.exp(behind) - 1 - behind).clamp(max=LARGEST_KL)
    pg_loss = aggregate(torch.minimum(worse, bound), mask, aggregation)
    kl_loss = aggregate(kl, mask, aggregation)
    if "kl_weights" in rows.keys():  # noqa: SIM118 (a TensorDict)
        kl_loss = weighted(kl, rows["kl_weights"])
    ce_loss = weighted(-log_prob, rows["ce_weights"])
    ce_loss = ce_loss + weighted(-log_prob, rows["positive_weights"])
    bonus = aggregate(entropy, mask, aggregation)
    loss = pg_loss - ENTROPY_COEFFICIENT * bonus + KL_COEFFICIENT * kl_loss + ce_loss
    return loss, {
        "pg_loss": pg_loss,
        "kl_loss": kl_loss,
        "ce_loss": ce_loss,
        "kl_coef": torch.tensor(KL_COEFFICIENT),
        "entropy": entropy[mask].mean(),
        "ppo_kl": -log_ratio[mask].mean(),
        "pg_clipfrac": (clipped > plain)[mask].float().mean(),
        "pg_clipfrac_lower": (worse > bound)[mask].float().mean(),
    }


def value_loss(
    logits: Tensor, rows: TensorDict, aggregation: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error to the returns, the larger of two where the step is clipped."""
    mask, value, returns = rows["response_mask"].bool(), logits.squeeze(-1), rows["returns"]
    near = value.clamp(rows["values"] - VALUE_CLIP, rows["values"] + VALUE_CLIP)
    plain, clipped = (value - returns) ** 2, (near - returns) ** 2
    loss = 0.5 * aggregate(torch.maximum(plain, clipped), mask, aggregation)
    return loss, {
        "vf_loss": loss,
        "vf_clipfrac": (clipped > plain)[mask].float().mean(),
        "vpred_mean": value[mask].mean(),
    }


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights)[weights != 0].sum() / (weights != 0).sum()


def aggregate(values: Tensor, mask: Tensor, mode: str) -> Tensor:
    """Over tokens, or over the rows that have some."""
    if mode == "token-mean":
        return values[mask].mean()
    rows = [row[kept] for row, kept in zip(values, mask, strict=True) if kept.any()]
    of_row = {"seq-mean-token-sum": torch.sum, "seq-mean-token-mean": torch.mean}[mode]
    return torch.stack([of_row(row) for row in rows]).mean()
