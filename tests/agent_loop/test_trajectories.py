import numpy as np
import pytest
import torch

from verl.agent_loop.base import AgentLoopMetrics, AgentLoopOutput
from verl.agent_loop.server_manager import SampledTurns
from verl.agent_loop.sessions import fill_trajectory
from verl.protocol.padded import Padding, padded_batch, trajectories_of
from verl.protocol.trajectory import Trajectory, trajectory_timing
from verl.workers.rollout.base import TokenOutput
from verl.workers.rollout.sequences import pad

LENGTHS = {"prompt_length": 3, "response_length": 4, "pad_token_id": 2}


def trajectory(output, *turns, **row):
    made = Trajectory(uid="a", sample=0, row=row)
    fill_trajectory(made, output, SampledTurns(list(turns), "s"), max_response_tokens=1024)
    return made


def as_batch(outputs, **lengths):
    return padded_batch([trajectory(output) for output in outputs], Padding(**lengths))


def output(prompt, response, **more):
    return AgentLoopOutput(
        **{
            "prompt_ids": prompt,
            "response_ids": response,
            "response_mask": [1] * len(response),
            "response_logprobs": [-0.5] * len(response),
            "num_turns": 2,
            **more,
        }
    )


def test_prompts_are_padded_on_the_left_and_responses_on_the_right():
    batch = as_batch([output([5], [6, 7]), output([8, 9, 10], [11])], **LENGTHS).batch
    assert batch["prompts"].tolist() == [[2, 2, 5], [8, 9, 10]]
    assert batch["responses"].tolist() == [[6, 7, 2, 2], [11, 2, 2, 2]]
    assert batch["input_ids"].tolist() == [[2, 2, 5, 6, 7, 2, 2], [8, 9, 10, 11, 2, 2, 2]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 0, 1, 2, 2, 2], [0, 1, 2, 3, 3, 3, 3]]
    assert batch["rollout_log_probs"].tolist() == [[-0.5, -0.5, 0, 0], [-0.5, 0, 0, 0]]


def test_an_end_token_that_is_also_the_pad_token_is_trained():
    batch = as_batch([output([5], [6, 2])], **LENGTHS).batch  # 2 ends and pads
    assert batch["response_mask"].tolist() == [[1, 1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 0, 0]]


def routes(num_tokens, expert):
    return np.full((num_tokens, 2, 2), [expert, 7], dtype=np.uint8)


def test_a_row_of_ids_alone_has_the_routes_of_its_longest_turn():
    first = TokenOutput(token_ids=[6], routed_experts=routes(1, 1))
    second = TokenOutput(token_ids=[9], routed_experts=routes(3, 2))  # of 5, 6, 8
    elsewhere = TokenOutput(token_ids=[6, 6, 6], routed_experts=routes(4, 3))
    whole = output([5], [6, 8, 9, 10], response_mask=[1, 0, 1, 0])
    for turns in ([first, second], [first, elsewhere, second]):
        assert trajectory(whole, *turns).segments[-1].routed_experts is second.routed_experts
    changed = output([5], [6, 8, 8], response_mask=[1, 0, 1])
    assert trajectory(changed, first, second).segments[-1].routed_experts is first.routed_experts
    assert trajectory(output([4, 5], [6]), first).segments[-1].routed_experts is None
    stated = output([5], [6], routed_experts=routes(1, 4))
    assert trajectory(stated, first).segments[-1].routed_experts is stated.routed_experts


def test_routes_are_a_column_where_all_trained_rows_have_them():
    known, unknown = (
        output([5], [6, 7], routed_experts=routes(2, 1)),
        output([5], [6, 7]),
    )
    untrained = output([5], [8], response_mask=[0])
    column = as_batch([known, untrained], **LENGTHS).batch["routed_experts"]
    assert column[:, :, 0, 0].tolist() == [[0, 0, 1, 1, 0, 0, 0], [0] * 7]
    assert "routed_experts" not in set(as_batch([known, unknown], **LENGTHS).batch.keys())
    assert "routed_experts" not in set(as_batch([untrained], **LENGTHS).batch.keys())


def test_what_a_tool_said_is_seen_but_not_trained():
    batch = as_batch([output([5], [6, 7, 8], response_mask=[1, 0, 1])], **LENGTHS).batch
    assert batch["response_mask"].tolist() == [[1, 0, 1, 0]]
    assert batch["attention_mask"][0, 3:].tolist() == [1, 1, 1, 0]


def test_a_response_that_is_too_long_is_cut_in_all_its_columns():
    batch = as_batch([output([5], [6, 7, 8, 9, 10, 11])], **LENGTHS).batch
    assert batch["responses"].tolist() == [[6, 7, 8, 9]]
    assert batch["response_mask"].tolist() == [[1, 1, 1, 1]]
    assert batch["rollout_log_probs"].shape == (1, 4)


def test_an_empty_response_makes_an_empty_mask():
    batch = as_batch([output([5], [])], **LENGTHS).batch
    assert batch["response_mask"].sum() == 0
    assert batch["attention_mask"].sum() == 1


def test_a_prompt_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match=r"a prompt of 4 tokens; rollout\.prompt_length is 3"):
        as_batch([output([5, 6, 7, 8], [9])], **LENGTHS)


def test_scores_of_the_loops_stand_on_the_last_token():
    outputs = [output([5], [6, 7], reward_score=0.5), output([5], [6], reward_score=-1.0)]
    assert as_batch(outputs, **LENGTHS).batch["rm_scores"].tolist() == [
        [0.0, 0.5, 0.0, 0.0],
        [-1.0, 0.0, 0.0, 0.0],
    ]
    assert "rm_scores" not in as_batch([output([5], [6])], **LENGTHS).batch


def test_loops_that_disagree_about_scoring_are_refused():
    outputs = [output([5], [6], reward_score=0.5), output([5], [6])]
    with pytest.raises(ValueError, match="scored 1 of 2 trajectories"):
        as_batch(outputs, **LENGTHS)


def test_extra_fields_become_columns_with_none_where_a_loop_has_none():
    outputs = [
        output([5], [6], extra_fields={"tool_rewards": [1.0], "board": "x"}),
        output([5], [6], num_turns=4),
    ]
    columns = as_batch(outputs, **LENGTHS).non_tensor_batch
    assert columns["board"].tolist() == ["x", None]
    assert columns["tool_rewards"].tolist() == [[1.0], []]
    assert columns["turn_scores"].tolist() == [[], []]
    assert columns["extras"].tolist() == [{}, {}]
    assert columns["max_global_steps"].tolist() == [None, None]
    assert columns["__num_turns__"].tolist() == [2, 4]


def test_log_probs_are_left_out_when_a_loop_has_none():
    batch = as_batch([output([5], [6]), output([5], [6], response_logprobs=None)], **LENGTHS)
    assert "rollout_log_probs" not in batch.batch


def test_lists_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="response_mask has 1 entries for 2 response_ids"):
        output([5], [6, 7], response_mask=[1])
    with pytest.raises(ValueError, match="response_logprobs has 3 entries for 2"):
        output([5], [6, 7], response_logprobs=[0.0, 0.0, 0.0])


def test_metrics_may_be_a_mapping():
    made = output([5], [6], metrics={"generate_sequences": 1.5})
    assert made.metrics == AgentLoopMetrics(generate_sequences=1.5)


def test_timing_names_the_slowest_trajectory():
    outputs = [
        output([5], [6], metrics={"generate_sequences": 1.0}),
        output([5, 6], [7, 8, 9], metrics={"generate_sequences": 2.0, "tool_calls": 0.5}),
    ]
    timing = trajectory_timing([trajectory(output) for output in outputs])
    assert timing["agent_loop/generate_sequences/mean"] == 1.5
    assert timing["agent_loop/slowest/tool_calls"] == 0.5
    assert timing["agent_loop/slowest/prompt_length"] == 2
    assert timing["agent_loop/slowest/response_length"] == 3


def test_columns_have_the_types_that_workers_expect():
    batch = as_batch([output([5], [6])], **LENGTHS).batch
    integers = {"prompts", "responses", "response_mask", "input_ids", "attention_mask"}
    assert {name for name in integers if batch[name].dtype == torch.long} == integers
    assert batch["rollout_log_probs"].dtype == torch.float32


def test_a_row_that_is_longer_than_its_place_is_refused():
    with pytest.raises(ValueError, match="a row has 3 entries; it is to be padded to 2"):
        pad([[1], [1, 2, 3]], 2, 0)


def turn(*ids, versions):
    return TokenOutput(token_ids=list(ids), policy_versions=versions)


def test_each_turn_of_the_model_keeps_the_versions_that_sampled_it():
    made = trajectory(
        output([5], [6, 7, 9, 8], response_mask=[1, 1, 0, 1]),
        turn(6, 7, versions=[3, 4]),
        turn(8, versions=[4]),
    )
    assert [s.author for s in made.segments] == ["template", "model", "tool", "model"]
    assert [s.versions for s in made.segments] == [None, [3, 4], None, [4]]
    assert made.versions == {3, 4}
    assert (made.prompt_ids, made.response_ids) == ([5], [6, 7, 9, 8])
    assert made.response_mask == [1, 1, 0, 1]


def test_a_segment_may_be_several_turns_or_the_beginning_of_one():
    one = trajectory(output([5], [6, 7, 8]), turn(6, versions=[1]), turn(7, 8, 9, versions=[2] * 3))
    assert one.segments[1].versions == [1, 2, 2]


def test_versions_of_tokens_that_no_engine_sampled_are_unknown():
    made = trajectory(output([5], [6, 7]), turn(6, 8, versions=[1, 1]))
    assert made.segments[1].versions is None
    assert made.versions == set()


def test_a_rejected_turn_is_passed_over():
    made = trajectory(output([5], [7]), turn(6, versions=[1]), turn(7, versions=[2]))
    assert made.segments[1].versions == [2]


def test_a_response_that_begins_with_a_tool_keeps_its_prompt():
    made = trajectory(output([5], [9, 6], response_mask=[0, 1]))
    assert (made.prompt_ids, made.response_ids) == ([5], [9, 6])


def test_a_batch_becomes_trajectories_and_the_same_batch_again():
    outputs = [
        output([5], [6, 7, 8], response_mask=[1, 0, 1], extra_fields={"note": "x"}),
        output([8, 9], [], num_turns=4, extra_fields={"note": None}),
    ]
    batch = as_batch(outputs, **LENGTHS)
    batch.batch["routed"] = torch.tensor([[1, 2], [3, 4]])
    again = padded_batch(trajectories_of(batch), Padding(**LENGTHS))
    assert set(again.batch.keys()) == set(batch.batch.keys())
    assert all(torch.equal(again.batch[name], batch.batch[name]) for name in again.batch.keys())  # noqa: SIM118
    assert again.non_tensor_batch["note"].tolist() == ["x", None]
    assert again.non_tensor_batch["__num_turns__"].tolist() == [2, 4]


def test_columns_of_the_row_join_unless_the_trajectory_brings_them():
    made = trajectory(output([5], [6], extra_fields={"note": "own"}), note="row", answer=7)
    columns = padded_batch([made], Padding(**LENGTHS)).non_tensor_batch
    assert (columns["note"][0], columns["answer"][0]) == ("own", 7)
