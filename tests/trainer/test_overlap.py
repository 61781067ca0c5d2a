"""Training on finished groups while others are generated gives what training afterwards gives."""

import asyncio
from functools import partial

import numpy as np
import pytest
import torch
from verl.workers.reward_manager.grading import PerResponseManager

from tests.toy import ACTOR, ROLLOUT, toy_run, weights
from verl.agent_loop.base import AgentLoopMetrics, AgentLoopOutput
from verl.agent_loop.single_turn import SingleTurnAgentLoop
from verl.agent_loop.trajectories import as_batch
from verl.config.validate_overlap import GROUP_LOCAL_ESTIMATORS
from verl.protocol import DataProto
from verl.trainer.ppo.credit import compute_advantage
from verl.trainer.ppo.overlap import OverlappedUpdate
from verl.trainer.ppo.reward import RewardError
from verl.trainer.ppo.trainer import PPOTrainer
from verl.workers.reward_manager.grader import Score
from verl.workers.reward_manager.managers import BatchRewardManager

ON = f"{ACTOR}.update_while_generating=true"
SGD = f"{ACTOR}.optim.optimizer=SGD"
ONE_STEP = "trainer.total_training_steps=1"
SMALL_PASSES = f"{ACTOR}.ppo_micro_batch_size_per_gpu=3"

SCORES = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    value = sum(map(ord, solution_str)) % 7
    return {"score": value / 7, "acc": value > 3}
"""
FAULTY = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    value = sum(map(ord, solution_str)) % 7
    if extra_info["index"] % 4 == 0:
        raise OSError("the judge is not there")
    if extra_info["index"] % 4 == 1:
        return None if value < 3 else 1.0
    return value / 7
"""
DIFFERS = (
    "timing", "perf/", "training/overlapped", "training/old_log_prob_pass_skipped",
    "training/rollout", "actor/old_log_prob_error", "rollout_corr",
)  # fmt: skip


class HeavyTailed(SingleTurnAgentLoop):
    """Most responses end soon, and a few go on to the limit."""

    async def run(self, sampling_params, **row):
        limit = 32 if sampling_params["seed"] % 4 == 0 else 2 + sampling_params["seed"] % 5
        params = {**sampling_params, "max_tokens": limit, "ignore_eos": True}
        return await super().run(params, **row)


def run(toy, folder, text, *changes, **options):
    folder.mkdir()
    (folder / "scores.py").write_text(text)
    loop = f"{HeavyTailed.__module__}.{HeavyTailed.__qualname__}"
    (folder / "loops.yaml").write_text(f"[{{name: heavy_tailed, _target_: {loop}}}]")
    settings = [
        f"custom_reward_function.path={folder / 'scores.py'}",
        f"{ROLLOUT}.agent.agent_loop_config_path={folder / 'loops.yaml'}",
        f"{ROLLOUT}.agent.default_agent_loop=heavy_tailed",
        "data.max_response_length=32",
        "data.val_files=[]",
    ]
    return toy_run(toy, folder, *settings, SGD, SMALL_PASSES, *changes, **options)


def assert_same(one, other):
    """Metrics, columns and weights of two runs, the second of which overlapped."""
    (metrics, trainer), (other_metrics, other_trainer) = one, other
    for step, other_step in zip(metrics, other_metrics, strict=True):
        named = {k: v for k, v in step.items() if not k.startswith(DIFFERS)}
        found = {k: v for k, v in other_step.items() if not k.startswith(DIFFERS)}
        assert found.keys() == named.keys()
        assert found == pytest.approx(named, rel=1e-6, abs=1e-6)
    for name in ("advantages", "token_level_scores", "responses"):
        columns = (t.batch.batch[name] for t in (trainer, other_trainer))
        torch.testing.assert_close(*columns)
    assert (
        trainer.batch.non_tensor_batch["uid"].tolist()
        == other_trainer.batch.non_tensor_batch["uid"].tolist()
    )
    start = weights(trainer)
    for name, tensor in weights(other_trainer).items():
        torch.testing.assert_close(tensor, start[name], rtol=1e-6, atol=1e-6)


def advantages(estimator, groups):
    """Of some groups of four responses, by themselves."""
    rewards, mask = torch.zeros(4 * len(groups), 6), torch.zeros(4 * len(groups), 6)
    for row in range(len(rewards)):
        length = 1 + (7 * groups[row // 4] + 3 * row) % 6
        mask[row, :length] = 1
        rewards[row, length - 1] = (5 * groups[row // 4] + row % 4) % 3
    uids = np.repeat(np.array([f"prompt {group}" for group in groups], dtype=object), 4)
    batch = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": mask}, non_tensors={"uid": uids}
    )
    return compute_advantage(batch, estimator, num_repeat=4).batch["advantages"]


@pytest.mark.parametrize("estimator", GROUP_LOCAL_ESTIMATORS)
def test_a_group_has_the_same_advantages_alone_and_among_others(estimator):
    together = advantages(estimator, [0, 1, 2])
    alone = torch.cat([advantages(estimator, [group]) for group in range(3)])
    assert together.abs().sum() > 0
    torch.testing.assert_close(alone, together, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimator", ["gpg", "reinforce_plus_plus_baseline"])
def test_estimators_that_look_across_groups_are_not_among_those(estimator):
    together = advantages(estimator, [0, 1, 2])
    alone = torch.cat([advantages(estimator, [group]) for group in range(3)])
    assert not torch.allclose(alone, together, atol=1e-3)
    assert estimator not in GROUP_LOCAL_ESTIMATORS


def test_a_run_that_overlaps_gives_the_same_metrics_and_weights(toy, tmp_path):
    ordinary = run(toy, tmp_path / "off", SCORES)
    overlapped = run(toy, tmp_path / "on", SCORES, ON)
    lengths = overlapped[1].batch.batch["response_mask"].sum(-1)
    assert len(set(lengths.tolist())) > 3, "responses end at different times"
    assert lengths.max() > 3 * lengths.median()
    assert_same(ordinary, overlapped)
    ratios = [step["training/overlapped_rows_ratio"] for step in overlapped[0]]
    assert all(0 <= ratio < 1 for ratio in ratios), "the last response's group comes after it"
    assert all(step["timing_s/overlapped_update"] > 0 for step in overlapped[0])


def test_groups_that_cannot_be_graded_are_set_aside_and_counted_as_ever(toy, tmp_path):
    order = "data.shuffle=false"
    ordinary = run(toy, tmp_path / "off", FAULTY, order, ONE_STEP)
    overlapped = run(toy, tmp_path / "on", FAULTY, order, ONE_STEP, ON)
    assert_same(ordinary, overlapped)
    assert overlapped[0][0]["reward/num_groups_set_aside"] >= 1.0
    assert overlapped[0][0]["reward/num_errors"] == 8.0, "four samples, tried twice"


def test_a_run_in_which_nothing_can_be_graded_stops_as_ever(toy, tmp_path):
    with pytest.raises(RewardError, match="none of 16 responses could be scored"):
        run(toy, tmp_path / "on", "def compute_score(**kwargs): return 'great'\n", ON)


def test_each_response_is_graded_once(toy, tmp_path):
    text = f"""
def compute_score(solution_str, **kwargs):
    with open({str(tmp_path / "calls")!r}, "a") as file:
        file.write("x")
    return float(len(solution_str) % 2)
"""
    run(toy, tmp_path / "on", text, ON, ONE_STEP)
    assert len((tmp_path / "calls").read_text()) == 16


class Judge(PerResponseManager):
    """The score of a response is its first token."""

    def responses(self, data):
        return data.batch["responses"][:, 0].tolist()

    async def judge(self, response):
        return Score(float(response))


class Workers:
    """Notes what an update is told."""

    def __init__(self):
        self.rows = []

    def begin_update(self, num_rows):
        self.num_rows = num_rows

    def add_to_update(self, group):
        self.rows += group.batch["responses"][:, 0].tolist()
        return len(self.rows)


def output(token):
    return AgentLoopOutput(
        prompt_ids=[1, 2],
        response_ids=[token, 3],
        response_mask=[1, 1],
        response_logprobs=[-0.5, -0.5],
        num_turns=2,
        metrics=AgentLoopMetrics(),
    )


def credited(batch):
    batch.batch["advantages"] = batch.batch["token_level_scores"]
    return batch


def test_a_group_is_trained_when_its_last_response_ends_and_before_others_do():
    workers = Workers()
    update = OverlappedUpdate(workers, Judge(), credited, num_prompts=2, samples_per_prompt=2)
    make = partial(as_batch, prompt_length=4, response_length=3, pad_token_id=0)

    async def generate():
        follower = update.follow(make)
        await follower.add(2, {"uid": "b", "raw_prompt": ["x"]}, output(7))
        await follower.add(3, {"uid": "b", "raw_prompt": ["x"]}, output(8))
        await follower.add(1, {"uid": "a", "raw_prompt": ["y"]}, output(6))
        for _ in range(2000):
            if workers.rows:
                break
            await asyncio.sleep(0.01)
        assert workers.rows == [7, 8], "the response that has no peer yet waits"
        await follower.add(0, {"uid": "a", "raw_prompt": ["y"]}, output(5))
        batch = make([output(token) for token in (5, 6, 7, 8)])
        batch.non_tensor_batch["uid"] = np.array(["a", "a", "b", "b"], dtype=object)
        batch.meta_info["timing"] = {}
        await follower.finish(batch)
        return batch

    batch = asyncio.run(generate())
    assert workers.num_rows == 4
    assert workers.rows == [7, 8, 5, 6], "in the order of the rows within a group"
    assert update.num_rows_before_end == 2
    scored = update.scored(batch).batch
    assert scored.batch["token_level_scores"].sum(-1).tolist() == [5.0, 6.0, 7.0, 8.0]


class SlowJudge(Judge):
    async def judge(self, response):
        await asyncio.sleep(0.2 if response == 7 else 0.0)
        return await super().judge(response)


def test_groups_are_taken_in_the_order_in_which_they_end_however_long_each_is_scored():
    workers = Workers()
    update = OverlappedUpdate(workers, SlowJudge(), credited, num_prompts=2, samples_per_prompt=1)
    make = partial(as_batch, prompt_length=4, response_length=3, pad_token_id=0)

    async def generate():
        follower = update.follow(make)
        await follower.add(1, {"uid": "b"}, output(7))
        await follower.add(0, {"uid": "a"}, output(5))
        batch = make([output(5), output(7)])
        batch.meta_info["timing"] = {}
        await follower.finish(batch)

    asyncio.run(generate())
    assert workers.rows == [7, 5]


class ShiftsCredit(PPOTrainer):
    """Compares all responses of a batch with each other."""

    def assign_credit(self, batch):
        batch = super().assign_credit(batch)
        batch.batch["advantages"] = batch.batch["advantages"] + 0.1 * len(batch)
        return batch


def test_a_stage_that_looks_beyond_groups_is_noticed_before_the_step(toy, tmp_path):
    with pytest.raises(ValueError, match="a stage of the trainer looks at more than a group"):
        run(toy, tmp_path / "on", SCORES, ON, trainer_class=ShiftsCredit)


def test_a_reward_manager_of_whole_batches_is_refused():
    manager = BatchRewardManager(None, 0, compute_score=lambda **columns: [])
    with pytest.raises(ValueError, match=r"BatchRewardManager judges whole.*update_while_gen"):
        OverlappedUpdate(None, manager, lambda batch: batch, num_prompts=1, samples_per_prompt=1)
