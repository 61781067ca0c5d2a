"""Responses are graded as they end; the grades are those that they would get afterwards."""

import asyncio
import threading

import numpy as np
import pytest

from tests.agent_loop.fakes import FakeRollout, loop_config
from tests.tiny_tokenizer import tiny_tokenizer
from verl.agent_loop import AgentLoopBase, AgentLoopManager, AgentLoopOutput, register
from verl.agent_loop.manager import groups_of_rows, options_of
from verl.agent_loop.rollouter import GradedGeneration, RolloutOptions, new_groups
from verl.protocol import DataProto
from verl.protocol.trajectory import InfraError, Score, Trajectory
from verl.trainer.ppo.context import StepBatch
from verl.trainer.ppo.reward import RewardError
from verl.trainer.ppo.scoring import graded, score_batch
from verl.workers.reward_manager.adapters import RewardManagerBase
from verl.workers.reward_manager.managers import NaiveRewardManager
from verl.workers.reward_manager.service import GradingService


@register("noting_for_tests")
class NotingLoop(AgentLoopBase):
    """Answers at once, with something to tell the reward function."""

    async def run(self, sampling_params, **kwargs):
        return AgentLoopOutput(
            prompt_ids=[5],
            response_ids=[6],
            response_mask=[1],
            num_turns=3,
            extra_fields={"turn_scores": [0.5], "note": kwargs["raw_prompt"]},
        )


@register("silent_for_tests")
class SilentLoop(AgentLoopBase):
    """Answers at once and tells nothing."""

    async def run(self, sampling_params, **kwargs):
        return AgentLoopOutput(prompt_ids=[5], response_ids=[6], response_mask=[1])


@register("scoring_for_tests")
class ScoringLoop(AgentLoopBase):
    """Scores its own trajectory."""

    async def run(self, sampling_params, **kwargs):
        return AgentLoopOutput(
            prompt_ids=[5], response_ids=[6], response_mask=[1], reward_score=0.25
        )


class WaitsForGrade(FakeRollout):
    """Does not answer the prompt `last` before somebody has graded another response."""

    def __init__(self, last: int, is_graded: threading.Event):
        super().__init__()
        self.last, self.is_graded = last, is_graded

    async def generate(self, request):
        for _ in range(12_000):
            if request.prompt_ids[-1] != self.last or self.is_graded.is_set():
                break
            await asyncio.sleep(0.005)
        assert request.prompt_ids[-1] != self.last or self.is_graded.is_set(), "nobody grades"
        return await super().generate(request)


def prompts(*texts, meta_info=None, **columns):
    return DataProto.from_dict(
        non_tensors={
            "raw_prompt": list(texts),
            "uid": list(texts),
            "data_source": ["sums"] * len(texts),
            "reward_model": [{"ground_truth": text} for text in texts],
            "extra_info": [{"index": place} for place in range(len(texts))],
            **columns,
        },
        meta_info=meta_info or {},
    )


def naive(function, **options):
    return NaiveRewardManager(tiny_tokenizer(), 0, function, timeout_seconds=20.0, **options)


def agent_loops(engine=None, reward_fn=None, val_reward_fn=None):
    made = AgentLoopManager(
        loop_config(), rollouts=[engine or FakeRollout()], tokenizer=tiny_tokenizer()
    )
    made.grade_with(reward_fn, val_reward_fn)
    return made


def generated(loops, rows):
    """The groups of the rows, with their responses."""
    groups = groups_of_rows(rows)
    loops.rollouter.generate(groups, options_of(rows.meta_info))
    return groups


def grades_of(groups):
    return [trajectory.grade for group in groups for trajectory in group.trajectories]


def scored_by(loops, rows, reward_fn):
    """What becomes of the rows, scored as a trainer does it."""
    groups = generated(loops, rows)
    batch = StepBatch(groups, loops.rollouter.padding).data
    return score_batch(batch, reward_fn, groups, loops.rollouter.grading)


def final_grades(loops, rows, reward_fn):
    groups = generated(loops, rows)
    batch = StepBatch(groups, loops.rollouter.padding).data
    return [t.grade for t in graded(batch, reward_fn, groups, loops.rollouter.grading)[0]]


def test_a_group_reaches_the_buffer_graded_while_another_is_still_generated():
    has_one = threading.Event()
    loops = agent_loops(WaitsForGrade(tiny_tokenizer().encode("b")[-1], has_one), naive(len_of))
    arrived = []

    def put(group):
        arrived.append(group)
        has_one.set()  # until then nobody answers b

    groups = new_groups(prompts("b", "a"), 2, step=1, seed_of=lambda uid, sample: sample)
    loops.rollouter.start(groups, RolloutOptions(step=1), put).result(timeout=60)
    assert [group.uid for group in arrived] == ["a", "b"]
    trajectories = [t for group in arrived for t in group.trajectories]
    assert all(isinstance(t.grade, Score) for t in trajectories)
    assert len({t.session_id for t in trajectories} - {None}) == 4


def len_of(solution_str, **kwargs):
    return float(len(solution_str))


def test_a_response_is_graded_while_another_is_still_generated():
    is_graded = threading.Event()

    def function(**kwargs):
        is_graded.set()
        return 1.0

    last = tiny_tokenizer()("c").input_ids[-1]
    made = agent_loops(WaitsForGrade(last, is_graded), naive(function))
    groups = generated(made, prompts("a", "b", "c"))
    assert [grade.value for grade in grades_of(groups)] == [1.0] * 3
    assert made.rollouter.take_report(groups)[1]["reward_wait"] >= 0


class TellsAll(RewardManagerBase):
    """A user's manager that reports what it was given."""

    async def run_single(self, data):
        item = data[0]
        return {
            "reward_score": float(item.batch["responses"][0]),
            "reward_extra_info": {
                "columns": sorted(item.non_tensor_batch),
                "tensors": sorted(item.batch.keys()),
                "truth": item.non_tensor_batch["reward_model"]["ground_truth"],
            },
        }


def reports_all(solution_str, ground_truth, extra_info, **kwargs):
    extra_info = {k: v for k, v in extra_info.items() if k != "rollout_reward_scores"}
    return {"score": len(solution_str), "truth": ground_truth, **extra_info}


@pytest.mark.parametrize("manager", ["function", "run_single"])
def test_a_manager_is_given_the_same_during_generation_and_afterwards(manager):
    reward_fn = naive(reports_all)
    if manager == "run_single":
        reward_fn = TellsAll(config=None, tokenizer=tiny_tokenizer())
    names = np.array(["noting_for_tests"] * 4, dtype=object)
    rows = prompts(*"abcd", agent_name=names)
    found = grades_of(generated(agent_loops(reward_fn=reward_fn), rows))
    assert found == final_grades(agent_loops(), rows, reward_fn)
    if manager == "function":
        assert found[1].extras == {
            "truth": "b", "index": 1, "num_turns": 3, "turn_scores": [0.5], "note": "b",
        }  # fmt: skip


class CountsBatches(NaiveRewardManager):
    """Notes how many responses it is given at a time."""

    def prepare(self, trajectories):
        undecoded = [t for t in trajectories if t.text is None]
        if undecoded:
            self.sizes = [*getattr(self, "sizes", []), len(undecoded)]
        super().prepare(trajectories)


def test_responses_that_end_together_are_handed_over_as_one_batch():
    reward_fn = CountsBatches(tiny_tokenizer(), 0, lambda ground_truth, **kw: ord(ground_truth))
    groups = generated(agent_loops(reward_fn=reward_fn), prompts(*"dacb"))
    assert sum(reward_fn.sizes) == 4
    assert len(reward_fn.sizes) <= 2, "one batch, or two if the machine was busy"
    assert [grade.value for grade in grades_of(groups)] == [100.0, 97.0, 99.0, 98.0]


def test_a_row_keeps_its_own_column_beside_trajectories_that_bring_one():
    class NotesColumns(RewardManagerBase):
        async def run_single(self, data):
            return {
                "reward_score": 1.0,
                "reward_extra_info": {"note": data[0].non_tensor_batch["note"]},
            }

    names = np.array(["noting_for_tests", "silent_for_tests"] * 2, dtype=object)
    rows = prompts(*"abcd", agent_name=names, note=list("wxyz"))
    reward_fn = NotesColumns(config=None, tokenizer=tiny_tokenizer())
    groups = generated(agent_loops(reward_fn=reward_fn), rows)
    assert [grade.extras["note"] for grade in grades_of(groups)] == ["a", "x", "c", "z"]


def test_a_generation_that_is_given_up_hands_nothing_over():
    service = GradingService(naive(lambda **kw: pytest.fail("graded")))

    async def give_up():
        grading = GradedGeneration(service)
        grading.add(Trajectory(uid="a", sample=0, row={}))
        grading.cancel()  # it was about to be handed over
        await asyncio.sleep(0.05)

    asyncio.run(give_up())
    service.close()


def test_a_manager_that_cannot_take_the_responses_stops_the_step():
    rows = prompts("a", "b")
    del rows.non_tensor_batch["data_source"]
    reward_fn = naive(lambda **kw: 1.0)
    with pytest.raises(RewardError, match="no column 'data_source'"):
        scored_by(agent_loops(reward_fn=reward_fn), rows, reward_fn)


def test_a_fault_during_generation_is_tried_again_when_the_batch_is_scored():
    calls = []

    def function(ground_truth, **kwargs):
        calls.append(ground_truth)
        if calls.count("b") == 1 and ground_truth == "b":
            raise OSError("not now")
        return 1.0

    reward_fn = naive(function)
    scored = scored_by(agent_loops(reward_fn=reward_fn), prompts("a", "b"), reward_fn)
    assert sorted(calls) == ["a", "b", "b"]
    assert scored.batch.batch["token_level_scores"].sum(1).tolist() == [1.0, 1.0]
    assert scored.metrics["reward/num_errors"] == 1.0


def test_validation_is_graded_by_its_own_manager():
    made = agent_loops(reward_fn=naive(lambda **kw: 1.0), val_reward_fn=naive(lambda **kw: 2.0))
    groups = generated(made, prompts("a", meta_info={"validate": True}))
    assert grades_of(groups) == [Score(2.0, {"acc": 2.0})]


def test_trajectories_that_have_a_score_are_not_graded():
    reward_fn = naive(lambda **kw: pytest.fail("graded"))
    names = np.array(["scoring_for_tests"] * 2, dtype=object)
    batch = agent_loops(reward_fn=reward_fn).generate_sequences(prompts("a", "b", agent_name=names))
    assert batch.batch["rm_scores"].sum(1).tolist() == [0.25, 0.25]


def test_a_manager_of_whole_batches_waits_for_the_batch():
    assert grades_of(generated(agent_loops(reward_fn=lambda data: None), prompts("a"))) == [None]


def test_a_batch_brings_its_scores_along_if_every_response_has_one():
    def function(ground_truth, **kwargs):
        return {"score": 0.5, "truth": ground_truth} if ground_truth != "c" else None

    reward_fn = naive(function)
    made = agent_loops(reward_fn=reward_fn)
    batch = made.generate_sequences(prompts("a", "b"))
    assert batch.batch["rm_scores"].sum(1).tolist() == [0.5, 0.5]
    result = reward_fn(batch, return_dict=True)
    assert result["reward_extra_info"] == {"truth": ["a", "b"]}
    assert "rm_scores" not in made.generate_sequences(prompts("a", "c")).batch.keys()  # noqa: SIM118


def test_loops_may_generate_again_after_grading_has_ended():
    made = agent_loops(reward_fn=naive(lambda **kw: 1.0))
    for _ in range(2):
        assert [grade.value for grade in grades_of(generated(made, prompts("a")))] == [1.0]
        made.rollouter.end_grading()


def test_an_error_in_generation_is_the_error_of_the_batch():
    made = agent_loops(FakeRollout(error=OSError("gone")), naive(lambda **kw: 1.0))
    with pytest.raises(RuntimeError, match="gone"):
        made.generate_sequences(prompts("a", "b"))


def test_every_kind_of_grade_is_the_same_during_generation_and_afterwards():
    def function(ground_truth, **kwargs):
        return {"a": {"score": 0.1, "acc": True}, "b": None, "c": float("nan")}[ground_truth]

    reward_fn = naive(function)
    rows = prompts("a", "b", "c")
    found = final_grades(agent_loops(reward_fn=reward_fn), rows, reward_fn)
    assert found == final_grades(agent_loops(), rows, reward_fn)
    assert isinstance(found[2], InfraError)
