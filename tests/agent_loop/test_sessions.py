"""What loops may return: one row, the rows of a session, nothing, or a fault of the world."""

import numpy as np
import pytest

from tests.agent_loop.fakes import FakeRollout, loop_config
from tests.tiny_tokenizer import tiny_tokenizer
from verl.agent_loop import AgentLoopBase, AgentLoopManager, AgentLoopOutput, register
from verl.agent_loop.rollouter import RolloutOptions, new_groups
from verl.agent_loop.sessions import BrokenWorld, fill_from_batch, require_working_world
from verl.algos.sessions import one_row_per_session
from verl.protocol import DataProto
from verl.protocol.trajectory import Abstain, Group, InfraError, InfraFault, Trajectory
from verl.trainer.ppo.context import StepBatch
from verl.trainer.ppo.metric_utils import conversation_metrics
from verl.trainer.ppo.scoring import score_batch
from verl.workers.reward_manager.managers import NaiveRewardManager


def row_of(*ids, **fields):
    return AgentLoopOutput(
        prompt_ids=[5], response_ids=list(ids), response_mask=[1] * len(ids), **fields
    )


@register("scripted_for_tests")
class ScriptedLoop(AgentLoopBase):
    """Sample k of a prompt returns, or raises, entry k of the row's column `script`."""

    async def run(self, sampling_params, **kwargs):
        result = kwargs["script"][sampling_params["seed"]]
        if isinstance(result, Exception):
            raise result
        return result


@register("broken_as_a_whole_for_tests")
class BrokenGroup(ScriptedLoop):
    """Sample 0 ends; then the environment that the group shares breaks."""

    @classmethod
    async def run_group(cls, make_loop, samples):
        await samples[0].run_in(make_loop())
        raise InfraFault("the shared board is gone", reason="board")


@register("forgetful_for_tests")
class Forgetful(ScriptedLoop):
    """Ends one sample and forgets the others."""

    @classmethod
    async def run_group(cls, make_loop, samples):
        await samples[0].run_in(make_loop())


def generated(scripts, *, loop="scripted_for_tests", reward_fn=None):
    manager = AgentLoopManager(loop_config(), rollouts=[FakeRollout()], tokenizer=tiny_tokenizer())
    if reward_fn is not None:
        manager.grade_with(reward_fn, reward_fn)
    count = len(scripts)
    columns = {
        "raw_prompt": [[{"role": "user", "content": "a"}]] * count,
        "uid": [f"p{n}" for n in range(count)],
        "agent_name": [loop] * count,
        "data_source": ["toy"] * count,
        "reward_model": [{"ground_truth": "1"}] * count,
        "script": scripts,
    }
    arrays = {name: np.empty(count, dtype=object) for name in columns}
    for name, values in columns.items():
        arrays[name][:] = values
    groups = new_groups(
        DataProto.from_dict(non_tensors=arrays),
        len(scripts[0]),
        step=1,
        seed_of=lambda uid, sample: sample,
    )
    manager.rollouter.generate(groups, RolloutOptions(step=1))
    return manager, groups


def test_a_list_is_the_rows_of_one_session_and_its_reward_is_on_the_last():
    session = [row_of(6), row_of(7, 8, reward_score=0.5), row_of(9)]
    manager, (group,) = generated([[row_of(6, reward_score=1.0), session]])
    assert [(t.sample, t.rows_after) for t in group.trajectories] == [
        (0, 0),
        (1, 2),
        (1, 1),
        (1, 0),
    ]
    batch = StepBatch([group], manager.rollouter.padding).data
    assert batch.non_tensor_batch["session_uid"].tolist() == ["p0/0"] + ["p0/1"] * 3
    assert batch.batch["rm_scores"].sum(-1).tolist() == [1.0, 0.0, 0.0, 0.5]


def test_a_response_that_is_cut_to_the_width_of_the_batch_counts_as_truncated():
    tokens = range(6, 6 + 200)
    _, (group,) = generated([[row_of(*tokens, stop_reason="stop"), row_of(7, stop_reason="stop")]])
    cut, whole = group.trajectories
    assert cut.num_response_tokens < 200
    assert (cut.stop_reason, whole.stop_reason) == ("length", "stop")


def test_single_rows_make_the_batch_they_always_made():
    manager, (group,) = generated([[row_of(6), [row_of(7)]]])
    assert "session_uid" not in StepBatch([group], manager.rollouter.padding).data.non_tensor_batch


def test_rows_of_a_session_with_different_rewards_are_refused():
    with pytest.raises(ValueError, match=r"rewards \[1.0, 0.5\]; the rows of a session share"):
        generated([[[row_of(6, reward_score=1.0), row_of(7, reward_score=0.5)]]])


def test_the_reward_function_is_called_once_per_session_and_sees_all_rows():
    calls = []

    def score(data_source, solution_str, ground_truth, extra_info):
        calls.append(extra_info.get("session_responses"))
        return {"score": float(len(calls)), "seen": True}

    reward_fn = NaiveRewardManager(tiny_tokenizer(), 0, score)
    session = [row_of(6), row_of(7)]
    manager, groups = generated([[session, row_of(8)]], reward_fn=reward_fn)
    batch = StepBatch(groups, manager.rollouter.padding).data
    while_generated = score_batch(batch, reward_fn, groups, manager.rollouter.grading)
    texts = tiny_tokenizer().batch_decode([[6], [7]], skip_special_tokens=True)
    assert sorted(calls, key=str) == [None, texts]
    afterwards = score_batch(batch, reward_fn)
    assert len(calls) == 4
    for scored in (while_generated, afterwards):
        rewards = scored.batch.batch["token_level_scores"].sum(-1)
        assert rewards[0] == 0
        assert (rewards[1:] > 0).all()
        assert scored.batch.non_tensor_batch["seen"].tolist() == [None, True, True]


def test_none_and_faults_leave_their_group_with_a_reason():
    fault = InfraFault("no route to the sandbox", reason="sandbox")
    _, (group,) = generated([[row_of(6), None, fault, [], row_of(7)]])
    assert [t.sample for t in group.trajectories] == [0, 4]
    assert [(t.sample, type(t.grade)) for t in group.lost] == [
        (1, Abstain), (2, InfraError), (3, Abstain),
    ]  # fmt: skip
    assert group.lost[1].grade == InfraError(
        "no route to the sandbox", kind="sandbox", is_final=True
    )


def test_a_fault_of_a_whole_group_loses_those_that_have_not_ended():
    _, (group,) = generated([[row_of(6), row_of(7), row_of(8)]], loop="broken_as_a_whole_for_tests")
    assert [t.sample for t in group.trajectories] == [0]
    assert [t.grade.kind for t in group.lost] == ["board", "board"]


def test_any_other_exception_of_a_loop_still_ends_the_run():
    with pytest.raises(KeyError, match="a mistake of the loop"):
        generated([[row_of(6), KeyError("a mistake of the loop")]])


def test_groups_that_lose_too_many_are_dropped_by_the_rule_of_abstentions():
    fault = InfraFault("gone")
    ok = row_of(6, reward_score=1.0)
    scripts = [[ok, ok, fault], [ok, fault, None], [fault, fault, fault], [ok, ok, ok]]
    manager, groups = generated(scripts)
    batch = StepBatch(groups, manager.rollouter.padding).data
    scored = score_batch(batch, lambda data: data.batch["rm_scores"], groups)
    assert scored.batch.non_tensor_batch["uid"].tolist() == ["p0", "p0", "p3", "p3", "p3"]
    assert set(scored.dropped) == {"p1", "p2"}
    assert scored.metrics["reward/num_groups_set_aside"] == 2


def test_a_run_stops_above_the_threshold_and_says_what_is_broken():
    fault = InfraFault("connection refused", reason="search")
    _, groups = generated([[row_of(6), fault], [row_of(6), row_of(7)]])
    require_working_world(groups, 0.25)
    with pytest.raises(BrokenWorld, match=r"1 of 4 .*search 1.*connection refused.*max_infra_rat"):
        require_working_world(groups, 0.2)


def test_a_batch_from_elsewhere_says_whose_rows_it_has():
    manager, groups = generated([[[row_of(6), row_of(7)], None, row_of(8)], [row_of(9)] * 3])
    batch = manager._as_batch(groups)
    assert batch.non_tensor_batch["request_row"].tolist() == [0, 0, 2, 3, 4, 5]
    asked = [
        Group(
            index=n, uid=group.uid, drawn_at=1,
            trajectories=[Trajectory(uid=group.uid, sample=k, row={}) for k in range(3)],
        )
        for n, group in enumerate(groups)
    ]  # fmt: skip
    fill_from_batch(asked, batch)
    for found, group in zip(asked, groups, strict=True):
        assert [t.response_ids for t in found.trajectories] == [
            t.response_ids for t in group.trajectories
        ]
        assert [(t.sample, t.rows_after) for t in found.trajectories] == [
            (t.sample, t.rows_after) for t in group.trajectories
        ]
        assert [t.sample for t in found.lost] == [t.sample for t in group.lost]
    del batch.non_tensor_batch["request_row"]
    wanted = [Group(index=0, uid="p", drawn_at=1, trajectories=asked[0].trajectories[:1])]
    with pytest.raises(ValueError, match="1 rows were to be continued and 6 came back"):
        fill_from_batch(wanted, batch)


def test_outcomes_of_tools_and_forks_are_counted_per_session():
    said = {"tool_outcomes": {"reply": 2, "timeout": 1}, "fork_reasons": {"compaction": 1}}
    session = [row_of(6), row_of(7, extra_fields=said)]
    fault = InfraFault("no answer", reason="search")
    manager, groups = generated([[session, row_of(8, extra_fields=said), fault, None]])
    metrics, _ = manager.rollouter.take_report(groups)
    assert metrics == {
        "rollout/truncated_ratio": 0.0,
        "rollout/rows_per_session": 1.5,
        "rollout/env_faults": 1.0,
        "rollout/env_faults/search": 1.0,
        "rollout/empty_sessions": 1.0,
        "rollout/tool_outcomes/reply": 4.0,
        "rollout/tool_outcomes/timeout": 2.0,
        "rollout/fork_reasons/compaction": 2.0,
    }
    batch = StepBatch(groups, manager.rollouter.padding).data
    counts = conversation_metrics(one_row_per_session(batch).non_tensor_batch)
    assert counts["tool_call_counts/mean"] == 3.0


def test_a_group_that_ends_without_its_samples_is_a_mistake_of_the_loop():
    with pytest.raises(RuntimeError, match=r"Forgetful.run_group ended 1 of 2 samples"):
        generated([[row_of(6), row_of(7)]], loop="forgetful_for_tests")
