"""Which groups a step trains on, and that a second step can be in flight."""

import threading

import pytest

from verl.agent_loop.buffer import (
    Buffer,
    BufferPolicy,
    DynamicSampling,
    OnPolicy,
    PreferredGroups,
)
from verl.protocol.trajectory import Abstain, Group, Score, Segment, Trajectory


def group(index, *values, step=1, fault=None, **reported):
    """A group with one trajectory per score."""
    grades = [
        Score(value, {name: column[n] for name, column in reported.items()})
        for n, value in enumerate(values)
    ]
    trajectories = [
        Trajectory(uid=f"{step}-{index}", sample=n, row={}, grade=grade)
        for n, grade in enumerate(grades)
    ]
    return Group(
        index=index, uid=f"{step}-{index}", drawn_at=step, trajectories=trajectories, fault=fault
    )


def dynamic(num_prompts, *, gen_batch_size=2, metric="score", max_num_gen_batches=0):
    return DynamicSampling(num_prompts, gen_batch_size, metric, max_num_gen_batches)


def fill(policy, *batches, step=1):
    """Answer each demand with the next batch of groups, last group first; what the step takes."""
    buffer, pending, num_demands = Buffer(policy), list(batches), 0
    for count in buffer.demands(step):
        batch = pending.pop(0)
        assert count == len(batch)
        num_demands += 1
        for index, one in zip(buffer.begin(count, step=step), batch, strict=True):
            one.index = index
        for one in reversed(batch):
            buffer.put(one)
    return buffer.take(step), num_demands


def uids(groups):
    return [one.uid for one in groups]


def test_a_step_trains_on_its_own_prompts_in_data_order_whichever_ended_first():
    taken, num_demands = fill(OnPolicy(3), [group(0, 1), group(1, 1), group(2, 1)])
    assert uids(taken.groups) == ["1-0", "1-1", "1-2"]
    assert (taken.discarded, num_demands) == ([], 1)


def test_groups_without_a_difference_are_passed_over_until_there_are_enough():
    taken, num_demands = fill(
        dynamic(2),
        [group(0, 0, 1), group(1, 1, 1)],
        [group(2, 0, 0), group(3, 0, 0)],
        [group(4, 0, 1), group(5, 1, 0)],
    )
    assert uids(taken.groups) == ["1-0", "1-4"]
    assert uids(taken.discarded) == ["1-1", "1-2", "1-3", "1-5"]
    assert num_demands == 3


def test_scores_are_compared_in_single_precision():
    assert not dynamic(1).is_informative(group(0, 0.1 + 0.2, 0.3))
    assert dynamic(1).is_informative(group(0, 0.3, 0.3001))


def test_a_single_response_always_counts_and_a_fault_never():
    assert dynamic(1).is_informative(group(0, 1.0))
    assert not dynamic(1).is_informative(group(0, 1.0, 0.0, fault="the judge is gone"))


def test_responses_without_a_verdict_do_not_count():
    abstained = group(0, 1.0, 1.0)
    abstained.trajectories.append(Trajectory(uid="a", sample=2, row={}, grade=Abstain("")))
    assert not dynamic(1).is_informative(abstained)


def test_what_must_differ_can_be_anything_that_was_reported():
    same, other = group(0, 0, 1, acc=[True, True]), group(1, 0, 1, acc=[True, False])
    assert not dynamic(1, metric="acc").is_informative(same)
    assert dynamic(1, metric="acc").is_informative(other)
    assert dynamic(1, metric="seq_reward").is_informative(same)
    with pytest.raises(ValueError, match=r"'accuracy', but responses only have: score, .*acc"):
        fill(dynamic(1, metric="accuracy"), [same, other])


def test_too_many_batches_in_vain_are_an_error_with_the_ways_out():
    dull = [[group(0, 1, 1), group(1, 0, 0)] for _ in range(3)]
    with pytest.raises(ValueError, match=r"2 generation batches gave 0 of 1 .*max_num_gen_batches"):
        fill(dynamic(1, max_num_gen_batches=2), *dull)


def test_zero_sets_no_limit():
    dull = [[group(0, 1, 1), group(1, 0, 0)] for _ in range(20)]
    assert fill(dynamic(1), *dull, [group(0, 0, 1), group(1, 1, 1)])[1] == 21


def test_groups_are_settled_once_before_the_policy_looks_at_them():
    buffer, seen = Buffer(dynamic(1)), []

    def settle(groups):
        seen.append([one.index for one in groups])
        groups[-1].trajectories = group(9, 0, 1).trajectories

    for count in buffer.demands(1, settle):
        for index in buffer.begin(count, step=1):
            buffer.put(group(index, 1, 1))
    assert seen == [[0, 1]]
    assert [one.index for one in buffer.take(1).groups] == [1]


def test_take_waits_until_the_last_group_has_ended():
    buffer = Buffer(OnPolicy(1))
    (index,) = buffer.begin(1, step=1)
    with pytest.raises(TimeoutError, match="step 1 waits for 1 groups"):
        buffer.take(1, timeout_seconds=0.01)
    threading.Timer(0.05, buffer.put, (group(index, 1),)).start()
    assert len(buffer.take(1, timeout_seconds=60).groups) == 1


def test_an_error_in_generation_reaches_whoever_waits():
    buffer = Buffer(OnPolicy(1))
    buffer.begin(1, step=1)
    threading.Timer(0.05, buffer.fail, (OSError("gone"),)).start()
    with pytest.raises(OSError, match="gone"):
        buffer.take(1, timeout_seconds=60)


def test_indices_go_on_after_a_resume():
    buffer = Buffer(OnPolicy(2))
    buffer.begin(2, step=1)
    for index in range(2):
        buffer.put(group(index, 1))
    buffer.take(1)
    buffer.publish(1)
    resumed = Buffer(OnPolicy(2))
    resumed.load_state_dict(buffer.state_dict())
    assert list(resumed.begin(2, step=2)) == [2, 3]


def test_a_dropped_step_leaves_nothing_behind():
    buffer = Buffer(dynamic(2))
    buffer.begin(1, step=1)
    buffer.put(group(0, 1, 1))
    buffer.drop(1)
    assert buffer.state_dict() == {"num_drawn": 1, "version": 0}


class AheadByOne(BufferPolicy):
    """As later modes will: prompts of the next step are drawn before this one is trained."""

    def __init__(self, num_prompts):
        self.num_prompts = num_prompts

    def demand(self, step, state):
        return (state.version + 2) * self.num_prompts - state.num_drawn

    def select(self, step, state):
        due = range((step - 1) * self.num_prompts, step * self.num_prompts)
        return list(due) if all(index in state.ended for index in due) else None


def test_the_groups_of_a_second_step_run_while_the_first_is_trained():
    buffer = Buffer(AheadByOne(2))
    assert next(buffer.demands(1)) == 4
    assert list(buffer.begin(4, step=1)) == [0, 1, 2, 3]
    for index in (3, 1, 0):  # the last one of the second step ends before the first step does
        buffer.put(group(index, 1))
    assert [one.index for one in buffer.take(1).groups] == [0, 1]
    with pytest.raises(TimeoutError):
        buffer.take(2, timeout_seconds=0.01)
    assert list(buffer.demands(1)) == [], "no capacity before the version rises"
    buffer.put(group(2, 1))
    buffer.publish(1)
    assert next(buffer.demands(2)) == 2
    assert [one.index for one in buffer.take(2).groups] == [2, 3]


def preferring(num_prompts, num_drawn, *, bounds=(0.2, 0.8), limit=None):
    return PreferredGroups(
        num_prompts, num_drawn, accuracy_bounds=bounds, max_response_tokens=limit
    )


def test_prompts_of_middling_accuracy_come_first_and_others_fill_up():
    drawn = [group(0, 1, 1), group(1, 0, 1), group(2, 0, 0), group(3, 1, 0), group(4, 0, 1)]
    policy = preferring(2, 5)
    taken, num_demands = fill(policy, drawn)
    assert uids(taken.groups) == ["1-1", "1-3"]
    assert uids(taken.discarded) == ["1-0", "1-2", "1-4"]
    assert num_demands == 1
    counts = policy.metrics(taken)
    assert counts["train/num_groups_drawn"] == 5
    assert counts["train/num_groups_out_of_bounds"] == 2
    assert counts["train/num_groups_filled_up"] == 0
    few = preferring(3, 3)
    taken, _ = fill(few, [group(0, 1, 1), group(1, 0, 1), group(2, 0, 0, fault="lost")])
    assert uids(taken.groups) == ["1-0", "1-1"], "in data order, without the one at fault"
    assert few.metrics(taken)["train/num_groups_filled_up"] == 1


def test_accuracy_is_what_graders_report_and_bounds_belong_to_it():
    policy = preferring(1, 1)
    assert policy.is_within_bounds(group(0, 9, 9, acc=[True, False]))
    assert not policy.is_within_bounds(group(0, 0.5, 0.5, acc=[True, True]))
    assert policy.is_within_bounds(group(0, 0.2, 0.2))
    assert preferring(1, 1, bounds=None).is_within_bounds(group(0, 1, 1))


def test_a_prompt_with_a_response_at_the_limit_is_second_choice():
    long, short = group(0, 0, 1), group(1, 0, 1)
    for one, length in ((long, 4), (short, 3)):
        prompt = Segment(author="user", token_ids=[1])
        answer = Segment(author="model", token_ids=[2] * length, parent=0)
        one.trajectories[0].segments = [prompt, answer]
    policy = preferring(1, 2, bounds=None, limit=4)
    taken, _ = fill(policy, [long, short])
    assert uids(taken.groups) == ["1-1"]
    assert policy.metrics(taken)["train/num_groups_truncated"] == 1
