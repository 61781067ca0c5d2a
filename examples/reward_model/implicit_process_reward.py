"""A reward for every token: the implicit process reward of PRIME (arXiv:2502.01456).

A language model that was trained to tell right from wrong solutions (with a DPO or cross-entropy
loss on outcomes) has learned more than that. By how much it favours a token over the model it
started from is a reward for this very step:

    r_t = beta * (log p_model(y_t | y_<t) - log p_reference(y_t | y_<t))

This reward manager returns these (B, T) rewards; with a reward model or `rm_scores` from elsewhere
in the batch, it adds the score of the outcome. Use it with an estimator that looks at tokens:

    reward_manager.source=importlib
    reward_manager.name=ImplicitProcessReward
    reward_manager.module.path=examples/reward_model/implicit_process_reward.py
    +reward_model.reward_kwargs.model_path=... +reward_model.reward_kwargs.reference_path=...
    algorithm.adv_estimator=reinforce_plus_plus        # or gae; grpo sums over the response
"""

from functools import partial
from typing import Any

from torch import Tensor

from verl import DataProto
from verl.models.loading import load_causal_lm
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.reward_manager import AbstractRewardManager

COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses")


class ImplicitProcessReward(AbstractRewardManager):
    """Both models share the policy's tokenizer; they are frozen and run where `device` says."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Any = None,
        reward_fn_key: str = "data_source",
        *,
        model_path: str,
        reference_path: str,
        beta: float = 0.05,
        device: str = "cpu",
        micro_batch_size: int = 8,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.beta = beta
        self.cut = MicroBatching(rows=micro_batch_size)
        self.model, self.reference = (frozen(path, device) for path in (model_path, reference_path))

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        rows = data.batch.select(*COLUMNS)
        favoured, usual = (
            engine.infer_batch(rows, micro_batching=self.cut)["log_probs"].cpu()
            for engine in (self.model, self.reference)
        )
        process = self.beta * (favoured - usual)  # (B, T), 0 where there is no token
        outcome = data.batch.get("rm_scores", default=0.0)
        if not return_dict:
            return process + outcome
        report = {"process_reward": process.sum(-1).tolist()}
        return {"reward_tensor": process + outcome, "reward_extra_info": report}


def frozen(path: str, device: str) -> OneDeviceEngine:
    engine = OneDeviceEngine(partial(load_causal_lm, path, device=device))
    engine.initialize()
    return engine
