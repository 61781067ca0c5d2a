"""Files that start from another one and change what a kind of run needs: asynchronous training,
and the algorithms of papers that are settings.

A preset is a base file and the keys that differ. What it sets counts as set by the user, as in a
file of the user's own.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A file that extends `base`; `summary` is its first comment."""

    base: str
    summary: str
    values: dict[str, Any]


BESIDE = {
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
}
"""Generation on ranks of its own."""

ONE_STEP_OFF = BESIDE | {
    "async_training.mode": "one_step_off",
    "algorithm.rollout_correction.bypass_mode": True,
}
FULLY_ASYNC = BESIDE | {
    "async_training.mode": "fully_async",
    "async_training.use_rollout_log_probs": True,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.total_rollout_steps": 100,
    "actor_rollout_ref.rollout.total_epochs": 10,
    "actor_rollout_ref.rollout.test_freq": 1,
    "data.train_batch_size": 0,
    "data.gen_batch_size": 1,
}
TRANSFER_QUEUE = {"transfer_queue.enable": True}
CLIP_HIGHER = {
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.28,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
}
DAPO = CLIP_HIGHER | {
    "algorithm.adv_estimator": "grpo",
    "algorithm.filter_groups.enable": True,
    "algorithm.filter_groups.metric": "acc",
    "actor_rollout_ref.rollout.n": 16,
    "reward_model.reward_manager": "dapo",
    "reward_model.reward_kwargs.max_resp_len": "${data.max_response_length}",
}
ENTROPY = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "kl_cov",
    "actor_rollout_ref.actor.policy_loss.kl_cov_ratio": 0.0002,
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": 1.0,
    "actor_rollout_ref.rollout.n": 8,
    "reward_model.reward_manager": "dapo",
    "reward_model.reward_kwargs.max_resp_len": "${data.max_response_length}",
}
VAPO = CLIP_HIGHER | {
    "algorithm.adv_estimator": "gae",
    "algorithm.lam_critic": 1.0,
    "algorithm.lam_actor_alpha": 0.05,
    "actor_rollout_ref.actor.positive_nll_coef": 0.1,
    "actor_rollout_ref.actor.optim.lr": 1.0e-6,
    "actor_rollout_ref.rollout.n": 16,
    "critic.optim.lr": 2.0e-6,
    "trainer.critic_warmup": 50,
}
PF_PPO = {
    "trainer.recipe": "pf_ppo",
    "algorithm.adv_estimator": "gae",
    "algorithm.use_pf_ppo": True,
    "algorithm.pf_ppo.replay_size": 1024,
    "algorithm.rollout_correction.rollout_is": "token",
    "actor_rollout_ref.rollout.calculate_log_probs": True,
}
COLLABLLM = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.rollout.agent.default_agent_loop": "collabllm_agent",
    "actor_rollout_ref.rollout.multi_turn.enable": True,
    "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts": 3,
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": 2,
    "reward_model.reward_manager": "collabllm",
    "reward_model.reward_kwargs.metric_weights": {"accuracy": 1.0, "token_amount": -0.0001},
}
TOOLS = "examples/sglang_multiturn/config/tool_config"
RETOOL = CLIP_HIGHER | {
    "algorithm.adv_estimator": "grpo",
    "data.custom_cls.path": "pkg://recipe.retool.retool",
    "data.custom_cls.name": "CustomRLHFDataset",
    "custom_reward_function.path": "pkg://recipe.retool.retool",
    "custom_reward_function.name": "compute_score",
    "actor_rollout_ref.rollout.n": 16,
    "actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent",
    "actor_rollout_ref.rollout.multi_turn.enable": True,
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 8,
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": (
        f"{TOOLS}/sandbox_fusion_tool_config.yaml"
    ),
    "trainer.project_name": "retool",
}
SEARCH_R1 = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.rollout.n": 5,
    "actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent",
    "actor_rollout_ref.rollout.multi_turn.enable": True,
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 4,
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": f"{TOOLS}/search_tool_config.yaml",
    "trainer.project_name": "search_r1",
}
KINDS = {
    "one_step_off_ppo": (
        "One step off: train on a batch while the next one is sampled.",
        ONE_STEP_OFF,
    ),
    "fully_async_ppo": ("Fully asynchronous: prompts stream, weights follow.", FULLY_ASYNC),
    "transfer_queue_ppo": ("Batches stay in the store of TransferQueue.", TRANSFER_QUEUE),
}

PRIME = {
    "data.filter_accuracy": True,
    "data.filter_truncate": True,
    "data.truncation": "right",
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.actor.entropy_coeff": 0.001,
    "reward_model.enable": True,
    "reward_model.reward_manager": "prime",
    "algorithm.adv_estimator": "rloo",
    "trainer.recipe": "prime",
    "trainer.project_name": "prime",
    "trainer.val_before_train": False,
}
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
PAIRS = {
    "actor_rollout_ref.rollout.n": 2,
    LOSS: "dpo",
    "algorithm.adv_estimator": None,
}
"""Two responses to a prompt, compared by their rewards."""

SPPO = {"actor_rollout_ref.rollout.n": 5, LOSS: "sppo", "algorithm.adv_estimator": "sppo"}
RECIPES = {
    "collabllm": ("CollabLLM (arXiv:2502.00640): reward of simulated conversations.", COLLABLLM),
    "dapo": ("DAPO (arXiv:2503.14476): clip-higher, token-mean, dynamic sampling.", DAPO),
    "entropy": ("KL-Cov (arXiv:2505.22617); loss_mode=clip_cov is Clip-Cov.", ENTROPY),
    "pf_ppo": ("PF-PPO (arXiv:2409.06957) with a replay buffer.", PF_PPO),
    "retool": ("ReTool (arXiv:2504.11536): a code interpreter in the loop.", RETOOL),
    "search_r1": ("Search-R1 (arXiv:2503.09516): a search engine in the loop.", SEARCH_R1),
    "vapo": ("VAPO (arXiv:2504.05118): value pre-training, decoupled GAE, NLL.", VAPO),
    "online_dpo": (
        "Online DPO: the best against the worst response to a prompt.",
        PAIRS | {"trainer.recipe": "online_dpo", "trainer.project_name": "online_dpo"},
    ),
    "spin": (
        "SPIN: DPO against the policy of the step before.",
        PAIRS | {"trainer.recipe": "spin", "trainer.project_name": "spin"},
    ),
    "sppo": (
        "SPPO: log-ratios that follow the reward above its baseline.",
        SPPO | {"trainer.project_name": "sppo"},
    ),
    "prime": (
        "PRIME: an implicit process reward model is trained beside the policy.",
        PRIME,
    ),
}

PRESETS: dict[str, Preset] = {
    f"{kind}{variant}_trainer": Preset(f"ppo{variant}_trainer", *told)
    for kind, told in KINDS.items()
    for variant in ("", "_megatron")
} | {f"{name}_trainer": Preset("ppo_trainer", *told) for name, told in RECIPES.items()}
