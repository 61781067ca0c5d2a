"""CollabLLM: the answer is trained, the conversations that follow it are graded."""

import json

import pytest

from tests.tiny_tokenizer import tiny_tokenizer
from tests.toy import ROLLOUT, toy_run
from verl.interactions.base import BaseInteraction
from verl.protocol.trajectory import InfraError, Score, Trajectory
from verl.workers.reward_manager.adapters import groups_of
from verl.workers.reward_manager.collabllm import CollabRewardManager
from verl.workers.reward_manager.service import GradingService

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


class Echo(BaseInteraction):
    """Answers once, then has what it wants."""

    async def generate_response(self, instance_id, messages, **kwargs):
        num_said = sum(message["role"] == "user" for message in messages)
        return num_said > 2, "ok", None, {}


def graded(manager, *conversations):
    trajectory = Trajectory(uid="1", sample=0, row={"data_source": "x"}, text="7")
    trajectory.extra_fields["conversations"] = list(conversations)
    service = GradingService(manager)
    try:
        service.wait(groups_of([trajectory]))
    finally:
        service.close()
    return trajectory.grade


def said(*texts):
    return [{"role": role, "content": text} for role, text in texts]


def sevens(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == "77")


def test_the_reward_is_the_weighted_mean_over_conversations():
    """accuracy: (1 + 0) / 2; tokens of the model: (3 + 1) / 2."""
    manager = CollabRewardManager(
        tiny_tokenizer(), 0, sevens, metric_weights={"accuracy": 1.0, "token_amount": -0.1}
    )
    grade = graded(
        manager,
        said(("user", "1+1="), ("assistant", "7"), ("user", "ok"), ("assistant", "77")),
        said(("user", "1+1="), ("assistant", "7")),
    )
    assert grade == Score(0.5 - 0.1 * 2.0, {"accuracy": 0.5, "token_amount": 2.0, "acc": 0.5})


def test_a_metric_that_fails_is_a_fault_and_no_zero(tmp_path):
    (tmp_path / "mine.py").write_text("def broken(**kwargs):\n    raise OSError('no service')\n")
    manager = CollabRewardManager(
        tiny_tokenizer(),
        0,
        sevens,
        metric_weights={"accuracy": 1.0, "mine": 1.0},
        metrics={"mine": f"{tmp_path / 'mine.py'}:broken"},
    )
    grade = graded(manager, said(("user", "1+1="), ("assistant", "77")))
    assert isinstance(grade, InfraError)
    assert "no service" in grade.reason


@pytest.mark.parametrize("weights", [{}, {"interactivity": 1.0}, {"acuracy": 1.0}])
def test_metrics_that_nobody_has_are_refused(weights):
    with pytest.raises(ValueError, match=r"metric_weights.*Known: accuracy, token_amount"):
        CollabRewardManager(tiny_tokenizer(), 0, sevens, metric_weights=weights)


def test_an_answer_is_continued_several_times_and_alone_is_trained(toy, tmp_path):
    users = tmp_path / "users.yaml"
    name = "tests.trainer.recipes.test_collabllm.Echo"
    users.write_text(json.dumps({"interaction": [{"name": "echo", "class_name": name}]}))
    rows = [json.loads(line) for line in (toy / "train.jsonl").read_text().splitlines()]
    for row in rows:
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        row["extra_info"]["interaction_kwargs"] = {"name": "echo"}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics, trainer = toy_run(
        toy,
        tmp_path,
        f"data.train_files={tmp_path / 'train.jsonl'}",
        f"data.val_files={tmp_path / 'train.jsonl'}",
        "data.max_response_length=24",
        f"data.chat_template={json.dumps(TEMPLATE)}",
        f"{ROLLOUT}.agent.default_agent_loop=collabllm_agent",
        f"{ROLLOUT}.multi_turn.enable=true",
        f"{ROLLOUT}.multi_turn.num_repeat_rollouts=2",
        f"{ROLLOUT}.multi_turn.max_user_turns=2",
        f"{ROLLOUT}.multi_turn.interaction_config_path={users}",
        "reward_manager.name=collabllm",
        "reward_model.reward_kwargs.metric_weights.accuracy=1.0",
        "reward_model.reward_kwargs.metric_weights.token_amount=-0.01",
    )
    batch = trainer.batch
    for row in range(len(batch)):
        length = int(batch.batch["response_mask"][row].sum())
        assert int(batch.batch["attention_mask"][row, -24:].sum()) == length, "the answer alone"
        conversations = batch.non_tensor_batch["conversations"][row]
        assert len(conversations) == 2
        assert all(one[:2] == conversations[0][:2] for one in conversations), "from one answer"
    assert metrics[0]["reward/token_amount/mean"] > 0
