"""A run whose rewards come from a judge behind an HTTP endpoint."""

import pytest

from tests.toy import toy_run
from tests.workers.reward_manager.judge_server import TOKEN, judge_server, material_of, verdict
from verl.utils.environment import temp_env_var


def run(toy, output, server, *changes):
    with temp_env_var("TEST_JUDGE_KEY", TOKEN):
        return toy_run(
            toy,
            output,
            "custom_reward_function.path=null",
            "reward_manager.name=judge",
            f"reward_model.reward_kwargs.url={server.url}",
            "reward_model.reward_kwargs.model=judge",
            "reward_model.reward_kwargs.api_key_env=TEST_JUDGE_KEY",
            "reward_model.reward_kwargs.first_pause_seconds=0.01",
            "reward_model.max_concurrent=8",
            "trainer.total_training_steps=1",
            "data.val_files=[]",
            *changes,
        )


def share_of_even(request):
    """A verdict that differs between responses and can be checked."""
    candidate = material_of(request)["candidate"]
    return verdict(request, round(sum(map(ord, candidate)) % 2, 2))


@pytest.mark.parametrize("while_generating", ["true", "false"])
def test_verdicts_are_rewards(toy, tmp_path, while_generating):
    with judge_server(share_of_even) as server:
        metrics, trainer = run(
            toy, tmp_path, server, f"reward_model.use_reward_loop={while_generating}"
        )
    asked = [material_of(request) for request in server.requests]
    assert len(asked) == 16, "four prompts, four responses each"
    assert {entry["question"] for entry in asked} == set(
        trainer.batch.non_tensor_batch["raw_prompt"]
    )
    assert {entry["reference"] for entry in asked} == {"7"}
    expected = sum(sum(map(ord, entry["candidate"])) % 2 for entry in asked) / 16
    assert metrics[0]["critic/score/mean"] == pytest.approx(expected)
    assert metrics[0]["reward/judge_questions/mean"] == 1.0
    assert TOKEN not in (tmp_path / "metrics.jsonl").read_text()


def test_prompts_that_could_not_be_judged_are_set_aside_and_counted(toy, tmp_path):
    def answer(request):
        question = material_of(request)["question"]
        return (500, "down") if question == server.first else share_of_even(request)

    with judge_server(answer) as server:
        server.first = "0+0="
        metrics, trainer = run(
            toy,
            tmp_path,
            server,
            "reward_model.reward_kwargs.max_attempts=1",
            "data.shuffle=false",
        )
    assert metrics[0]["reward/num_groups_set_aside"] == 1
    assert "0+0=" not in set(trainer.batch.non_tensor_batch["raw_prompt"])
    assert len(trainer.batch) == 12
