"""A whole run with a real vLLM: the policy learns from what it generates, on the right weights."""

import json

import pytest

from tests.toy import ROLLOUT, make_toy, toy_run
from tests.workers.rollout.vllm.helpers import needs_vllm, saved_model
from verl.utils.environment import vllm_python

pytestmark = [*needs_vllm, pytest.mark.slow]


def test_a_policy_learns_from_what_vllm_generates(tmp_path):
    toy = make_toy(tmp_path)
    saved_model(toy / "model", "qwen2", tie_word_embeddings=True)
    metrics, _ = toy_run(
        toy,
        tmp_path / "run",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.python={vllm_python()}",
        f"{ROLLOUT}.n=8",
        f"{ROLLOUT}.calculate_log_probs=true",
        "actor_rollout_ref.actor.optim.lr=0.003",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=30",
        "trainer.total_epochs=10",
    )
    rewards = [step["critic/score/mean"] for step in metrics]
    assert len(rewards) == 30
    assert sum(rewards[:3]) / 3 < 0.1
    assert sum(rewards[-3:]) / 3 > 0.5
    # Every response was drawn from the weights that the trainer had, or the two would disagree.
    assert max(step["training/rollout_probs_diff_max"] for step in metrics) < 1e-4
    assert max(step["rollout/canary_max_diff"] for step in metrics) < 1e-4


def test_turns_between_replies_of_tools_continue_the_very_ids(tmp_path):
    """Log-probs of every turn are those of the whole conversation, also with cached prefixes."""
    toy = make_toy(tmp_path)
    saved_model(toy / "model", "qwen2", tie_word_embeddings=True)
    files = {name: str(tmp_path / name) for name in ("asked", "die_at")}
    entry = {"name": "asking", "_target_": "tests.e2e.asking.AskingLoop", "num_tokens": 40}
    (tmp_path / "loops.yaml").write_text(json.dumps([entry | files]))
    metrics, trainer = toy_run(
        toy,
        tmp_path / "run",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.python={vllm_python()}",
        f"{ROLLOUT}.calculate_log_probs=true",
        f"{ROLLOUT}.enable_prefix_caching=true",
        f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}",
        f"{ROLLOUT}.agent.default_agent_loop=asking",
        "data.max_response_length=128",
    )
    mask = trainer.batch.batch["response_mask"]
    attended = trainer.batch.batch["attention_mask"][:, -mask.shape[1] :]
    assert (attended.sum() - mask.sum()) > 16  # replies, in most of the 16 conversations
    assert attended.sum(-1).max() > 80
    assert max(step["training/rollout_probs_diff_max"] for step in metrics) < 1e-4
