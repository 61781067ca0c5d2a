"""Demonstrations and the text of tools in an update, as cross-entropy."""

import json

import numpy as np
import pytest
import torch

from tests.toy import ACTOR, toy_run
from verl.algos.rollout_correction.apply import compute_rollout_correction_and_add_to_batch
from verl.board.recorder import batch_arrays
from verl.config.algorithm import RolloutCorrectionConfig
from verl.protocol import DataProto
from verl.utils.dataset.sft_dataset import RowTooLong

SCORE = "critic/score/mean"


@pytest.fixture
def files(tmp_path):
    rows = [{"prompt": f"{a}+{b}=", "response": "7 7 7"} for a in range(3) for b in range(2)]
    path = tmp_path / "demonstrations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def replayed(toy, output, files, *changes):
    return toy_run(toy, output, f"{ACTOR}.sft_replay.files={files}", *changes)


def test_demonstrations_spread_over_optimizer_steps_and_touch_no_other_count(toy, files, tmp_path):
    changes = (
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.sft_replay.rows_per_mini_batch=3",
        f"{ACTOR}.sft_replay.coef=0.5",
    )
    steps, trainer = replayed(toy, tmp_path, files, *changes)
    assert steps[0]["actor/num_optimizer_steps"] == 2
    rows = trainer.components.add(trainer.batch, 1)
    is_demonstration = np.array([u.startswith("demo") for u in rows.non_tensor_batch["uid"]])
    assert is_demonstration.tolist() == ([False] * 8 + [True] * 3) * 2
    chosen = torch.from_numpy(is_demonstration)
    assert rows.batch["response_mask"][chosen].sum() == 0
    weights = rows.batch["demonstration_weights"]
    assert weights[~chosen].sum() == 0
    lengths = rows.batch["attention_mask"][chosen][:, -8:].sum(-1)
    assert weights[chosen].sum(-1).tolist() == (0.5 * lengths).tolist()
    text = trainer.tokenizer.decode(rows.batch["responses"][chosen][0], skip_special_tokens=True)
    assert text.replace(" ", "") == "777"


def test_demonstrations_follow_whole_prompts_where_the_loss_compares_responses(
    toy, files, tmp_path
):
    changes = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.policy_loss.loss_mode=gvpo")
    _, trainer = replayed(toy, tmp_path, files, *changes)
    batch = trainer.batch.select_idxs(np.arange(16) != 2)  # one of 4 responses could not be scored
    uids = trainer.components.add(batch, 1).non_tensor_batch["uid"]
    is_demonstration = [uid.startswith("demo") for uid in uids]
    assert is_demonstration == [False] * 7 + [True] + [False] * 8 + [True]


def test_the_order_follows_from_the_seed_and_the_step_alone(toy, files, tmp_path):
    _, trainer = replayed(toy, tmp_path, files, f"{ACTOR}.sft_replay.rows_per_mini_batch=4")
    part = trainer.components
    epoch = [part._index(place) for place in range(6)]
    assert sorted(epoch) == list(range(6))
    assert [part._index(place) for place in range(6, 12)] != epoch
    once, again = (part.add(trainer.batch, 2).batch["input_ids"] for _ in range(2))
    assert torch.equal(once, again)
    assert not torch.equal(once, part.add(trainer.batch, 3).batch["input_ids"])


def test_a_demonstration_that_does_not_fit_is_named_before_the_run(toy, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "response": "7 " * 50}) + "\n")
    with pytest.raises(RowTooLong, match=r"more than data.max_response_length \(8\)"):
        replayed(toy, tmp_path, path)


def test_text_of_tools_gets_its_weight_and_nothing_else_does(toy, tmp_path):
    _, trainer = toy_run(toy, tmp_path, f"{ACTOR}.ce_on_tool_text_coef=0.25")
    batch = trainer.batch
    batch.batch["response_mask"][0, 1:3] = 0  # as if a tool had written it
    weights = trainer.components.add(batch, 1).batch["tool_text_weights"]
    assert weights[0].tolist() == [0, 0.25, 0.25, 0, 0, 0, 0, 0]
    assert weights[1:].sum() == 0
    assert isinstance(batch, DataProto)
    assert "tool_text_weights" not in batch.batch.keys()  # noqa: SIM118


def test_a_rejected_token_is_no_text_of_tools(toy, tmp_path):
    _, trainer = toy_run(toy, tmp_path, f"{ACTOR}.ce_on_tool_text_coef=0.25")
    batch = trainer.batch
    batch.batch["response_mask"][0, 1] = 0
    batch.batch["rollout_log_probs"][0, 2] -= 5.0
    rejects = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    batch, _ = compute_rollout_correction_and_add_to_batch(batch, rejects)
    assert batch.batch["response_mask"][0, :4].tolist() == [1, 0, 0, 1]
    weights = trainer.components.add(batch, 1).batch["tool_text_weights"]
    assert weights[0].tolist() == [0, 0.25, 0, 0, 0, 0, 0, 0]
    mask = batch_arrays(batch)["column.mask"]
    assert mask[:4].tolist() == [1, 0, 1, 1], "a replay rejects it again"


@pytest.mark.slow
def test_demonstrations_teach_where_rewards_say_nothing(toy, files, tmp_path):
    (tmp_path / "nothing.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 0.0\n"
    )
    silent = (
        f"custom_reward_function.path={tmp_path / 'nothing.py'}",
        "trainer.total_training_steps=12",
    )
    steps, trainer = replayed(toy, tmp_path / "a", files, *silent)
    assert steps[-1]["actor/ce_loss"] < 0.3 * steps[0]["actor/ce_loss"]
    texts = trainer.tokenizer.batch_decode(trainer.batch.batch["responses"])
    assert sum("7" in text for text in texts) > len(texts) / 2
