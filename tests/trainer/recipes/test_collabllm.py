"""CollabLLM: the answer is trained, the conversations that follow it are graded."""

import json
import re
from contextlib import contextmanager

import pytest

from tests.server.engines import TOKEN, ScriptedRollout, byte_tokenizer
from tests.tiny_tokenizer import tiny_tokenizer
from tests.toy import ACTOR, ROLLOUT, recipe_run
from tests.trainer.recipes.collab_case import collab_settings, learn_collab
from verl.protocol.trajectory import Abstain, InfraError, Score, Trajectory
from verl.server import ServerOptions, serve
from verl.utils.environment import temp_env_var
from verl.workers.reward_manager.adapters import groups_of
from verl.workers.reward_manager.collabllm import CollabRewardManager
from verl.workers.reward_manager.service import GradingService


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
    metrics, trainer = recipe_run(
        toy,
        tmp_path,
        "collabllm",
        *collab_settings(toy, tmp_path),
        "data.max_response_length=24",
        f"{ROLLOUT}.n=4",
        f"{ROLLOUT}.multi_turn.num_repeat_rollouts=2",
    )
    batch = trainer.batch
    num_messages = set()
    for row in range(len(batch)):
        length = int(batch.batch["response_mask"][row].sum())
        assert int(batch.batch["attention_mask"][row, -24:].sum()) == length, "the answer alone"
        conversations = batch.non_tensor_batch["conversations"][row]
        assert len(conversations) == 2
        assert all(one[:2] == conversations[0][:2] for one in conversations), "from one answer"
        num_messages |= {len(one) for one in conversations}
    assert max(num_messages) > 3, "the user spoke, and the model after it"
    assert metrics[0]["reward/token_amount/mean"] > 0


# ---- a judge -------------------------------------------------------------------------------------


def verdict_on_sevens(request):
    """What a judge says of a conversation: 1 where the assistant has said 7, else 0."""
    asked = byte_tokenizer().decode(list(request.prompt_ids))
    (key,) = set(re.findall(r"BEGIN ([0-9a-f]+)", asked))
    score = int("assistant: 7" in asked)
    said = f'```verdict-{key}\n{{"score": {score}, "reason": "sevens"}}\n```'
    return byte_tokenizer()(said, add_special_tokens=False)["input_ids"]


@contextmanager
def judging(reply):
    """Settings that name a judge behind the project's own server."""
    options = ServerOptions(model="judge", max_model_len=16384, token=TOKEN)
    with (
        temp_env_var("COLLAB_JUDGE_KEY", TOKEN),
        serve([ScriptedRollout(reply, per_delta=1 << 20)], byte_tokenizer(), options) as server,
    ):
        yield {
            "url": f"{server.url}/v1",
            "model": "judge",
            "api_key_env": "COLLAB_JUDGE_KEY",
            "max_questions": 1,
            "max_attempts": 1,
            "sampling": {"max_tokens": 200},
        }


RIGHT = said(("user", "1+1="), ("assistant", "7"), ("user", "ok"), ("assistant", "x"))
WRONG = said(("user", "1+1="), ("assistant", "x"))
BOTH = {"accuracy": 1.0, "interactivity": 0.5}


def test_a_judge_behind_our_server_grades_each_conversation():
    """interactivity (1 + 0) / 2, accuracy 0; weights 0.5 and 1."""
    with judging(verdict_on_sevens) as judge:
        manager = CollabRewardManager(tiny_tokenizer(), 0, sevens, metric_weights=BOTH, judge=judge)
        grade = graded(manager, RIGHT, WRONG)
    assert grade == Score(0.25, {"accuracy": 0.0, "interactivity": 0.5, "acc": 0.0})


def test_a_judge_without_a_verdict_or_without_a_server_is_no_zero():
    with judging(lambda request: byte_tokenizer()("fine")["input_ids"]) as judge:
        manager = CollabRewardManager(tiny_tokenizer(), 0, sevens, metric_weights=BOTH, judge=judge)
        mute = graded(manager, RIGHT)
        assert isinstance(mute, Abstain)
        assert "no verdict in 1 answers of the judge" in mute.reason
    gone = graded(manager, RIGHT)
    assert isinstance(gone, InfraError)


def test_a_run_is_graded_by_the_judge(toy, tmp_path):
    with judging(verdict_on_sevens) as judge:
        metrics, _ = recipe_run(
            toy,
            tmp_path,
            "collabllm",
            *collab_settings(toy, tmp_path),
            "data.max_response_length=24",
            f"{ROLLOUT}.n=4",
            f"reward_model.reward_kwargs.metric_weights={json.dumps(BOTH)}",
            f"reward_model.reward_kwargs.judge={json.dumps(judge)}",
            "trainer.total_training_steps=1",
        )
    assert 0 <= metrics[0]["reward/interactivity/mean"] <= 1
    assert metrics[0]["reward/num_errors"] == 0


# ---- learning ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_conversations_teach_where_controls_do_not(toy, tmp_path):
    assert learn_collab(toy, tmp_path / "a")[-1] > 0.3
    assert max(learn_collab(toy, tmp_path / "b", f"{ACTOR}.optim.lr=0.0")) < 0.1
    assert max(learn_collab(toy, tmp_path / "c", graded_by="noise")) < 0.1
