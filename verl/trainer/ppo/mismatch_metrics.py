"""How far the engine that samples is from the model that trains, on the same tokens."""

import torch

from verl.protocol import DataProto


def calculate_debug_metrics(data: DataProto) -> dict[str, float]:
    """Compare the probabilities that rollout and training give to the sampled tokens.

    Token-weighted over the trained tokens, from `rollout_log_probs` and `old_log_probs`.
    `rollout_probs_diff_valid` is 1 if there are such tokens; if it is 0 there is nothing else.
    The correlation is left out where it is undefined: one token, or no spread on either side.
    """
    mask = data.batch["response_mask"].bool()  # (B, T)
    rollout = data.batch["rollout_log_probs"][mask].exp().double()
    actor = data.batch["old_log_probs"][mask].exp().double()
    if rollout.numel() == 0:
        return {"training/rollout_probs_diff_valid": 0}
    difference = (rollout - actor).abs()
    metrics = {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": difference.max().item(),
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_std": difference.std(correction=0).item(),
    }
    spread = rollout.std(correction=0) * actor.std(correction=0)
    if spread > 0:
        covariance = ((rollout - rollout.mean()) * (actor - actor.mean())).mean()
        correlation = torch.clamp(covariance / spread, -1, 1).item()
        metrics["training/rollout_actor_probs_pearson_corr"] = correlation
    return metrics
