"""Conversations on slots and pages: turns go on where they ended and give what computing all gives.

Run with `TRITON_INTERPRET=1` on a CPU.
"""

import dataclasses

import pytest

from tests.models.kernels.devices import on_each_device
from tests.tiny_models import tiny_model
from tests.workers.rollout.helpers import assert_nothing_is_left
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine

LIMITS = EngineLimits(
    max_num_seqs=6,
    max_prompt_tokens=70,
    max_response_tokens=40,
    max_session_bytes=0,
    tokens_per_step=3,
)
PROMPT = [3 + n * n % 50 for n in range(66)]  # a page and two tokens
REPLY = [40, 41]
TURN_TOKENS = 5

on_each_layout = pytest.mark.parametrize("layout", ["KernelBatch", "PagedBatch"])


def build(device, layout, **changes):
    model = tiny_model("qwen2", num_attention_heads=2, num_key_value_heads=1).to(device)
    limits = dataclasses.replace(LIMITS, **changes)
    if layout == "PagedBatch":  # a byte less than all slots take
        token_bytes = 2 * 2 * 16 * model.dtype.itemsize
        longest = limits.max_prompt_tokens + limits.max_response_tokens
        size = limits.max_num_seqs * longest * token_bytes
        limits = dataclasses.replace(limits, max_cache_bytes=size - 1)
    engine = NativeEngine(model, limits, eos_token_ids=[1])
    assert type(engine.core.batch).__name__ == layout
    return engine


def turn(history, session, seed, max_tokens=TURN_TOKENS, **options):
    params = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    sessions = None if session is None else (session,)
    return GenerationRequest(
        request_id=f"{session}{seed}",
        prompt_ids=history,
        params=params,
        session_ids=sessions,
        **options,
    )


def play(engine, prompts, num_turns, *, has_sessions=True, reply=REPLY):
    """All conversations take their turns together; the outputs of all turns."""
    histories, outputs = [list(prompt) for prompt in prompts], []
    for number in range(num_turns):
        asked = [
            turn(history, f"s{i}" if has_sessions else None, 10 * number + i)
            for i, history in enumerate(histories)
        ]
        found = [output for (output,) in engine.generate_batch(asked)]
        assert_nothing_is_left(engine)
        histories = [
            [*history, *output.token_ids, *reply]
            for history, output in zip(histories, found, strict=True)
        ]
        outputs += found
    return outputs


def assert_same(found, expected):
    """Up to the last digits, which libraries round differently for passes of other sizes."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=2e-5)


def assert_all_is_free(engine):
    budget = engine.core.batch.budget
    for pool in (budget.prompts, budget.pool):
        assert (pool.num_free, pool.num_busy) == (pool.capacity, 0)


def use_buckets(engine):
    from verl.workers.rollout.native.graphs import PrefillBuckets

    steps, kinds = engine.core.batch.steps, []

    def write_down(kind, run):
        kinds.append(kind)
        run()

    steps.buckets = PrefillBuckets(
        engine.core.runner, engine.core.cache, 256, steps.num_rows, write_down, steps._pages
    )
    return kinds


PROMPTS = [PROMPT, PROMPT[:30], PROMPT[1:64]]


@on_each_device
@on_each_layout
def test_turns_go_on_where_they_ended_and_nothing_is_copied_or_left(device, layout):
    expected = play(build(device, layout), PROMPTS, 3, has_sessions=False)
    for is_late, has_buckets in ((False, True), (True, False)):
        engine = build(device, layout)
        kinds = use_buckets(engine) if has_buckets else []
        engine.core.batch.steps.is_late = is_late
        first = play(engine, PROMPTS, 1)
        kept = {name: known.kept for name, known in engine.core.sessions._sessions.items()}
        own = [list(engine.core.batch.budget.pool.held(kept[f"s{i}"].own)) for i in range(3)]
        second_prompts = [
            [*prompt, *output.token_ids, *REPLY]
            for prompt, output in zip(PROMPTS, first, strict=True)
        ]
        asked = [turn(ids, f"s{i}", 10 + i) for i, ids in enumerate(second_prompts)]
        second = [output for (output,) in engine.generate_batch(asked)]
        sessions = engine.core.sessions._sessions
        for i in range(3):
            held = engine.core.batch.budget.pool.held(sessions[f"s{i}"].kept.own)
            assert list(held)[: len(own[i])] == own[i]
        assert_same([*first, *second], expected[:6])
        num_prompts = sum(map(len, PROMPTS))
        assert engine.core.num_prefilled_tokens == num_prompts + 3 * (1 + len(REPLY))
        assert [kind.has_known for kind in kinds] == [False, True][: len(kinds)]
        for i in range(3):
            engine.core.close_session(f"s{i}")
        assert_all_is_free(engine)


@on_each_device
@on_each_layout
def test_the_samples_of_a_group_go_on_from_one_prompt(device, layout):
    engine = build(device, layout)
    params = SamplingParams(max_tokens=TURN_TOKENS, seed=2, ignore_eos=True)
    first = GenerationRequest(
        request_id="g",
        prompt_ids=PROMPT,
        params=params,
        num_samples=3,
        session_ids=("a", "b", "c"),
    )
    (samples,) = engine.generate_batch([first])
    budget = engine.core.batch.budget
    shared = {
        tuple(budget.prompts.held(known.kept.shared))
        for known in engine.core.sessions._sessions.values()
    }
    assert len(shared) == 1, "all hold one prompt"
    second = [
        turn([*PROMPT, *output.token_ids, *REPLY], name, seed)
        for seed, (name, output) in enumerate(zip("abc", samples, strict=True))
    ]
    found = [output for (output,) in engine.generate_batch(second)]
    assert engine.core.num_prefilled_tokens == len(PROMPT) + 3 * (1 + len(REPLY))
    without = [dataclasses.replace(asked, session_ids=None) for asked in second]
    fresh = [output for (output,) in build(device, layout).generate_batch(without)]
    assert_same(found, fresh)
    for name in "abc":
        engine.core.close_session(name)
    assert_all_is_free(engine)


@on_each_device
@on_each_layout
def test_sessions_give_way_to_sequences_that_run_and_are_computed_again(device, layout):
    """Four conversations take turns on two rows, with no memory beside theirs."""
    limits = {"max_num_seqs": 2}
    prompts = [PROMPT[n : n + 60] for n in range(4)]
    expected = play(build(device, layout, **limits), prompts, 2, has_sessions=False)
    engine = build(device, layout, **limits)
    assert_same(play(engine, prompts, 2), expected)
    new = 4 * 60 + 4 * (1 + len(REPLY))
    assert new < engine.core.num_prefilled_tokens
    # With memory for all of them no token is computed twice.
    roomy = build(device, layout, max_session_bytes=1 << 20, **limits)
    assert_same(play(roomy, prompts, 2), expected)
    assert roomy.core.num_prefilled_tokens == new
    for one in (engine, roomy):
        one.core.sessions.clear()
        assert_all_is_free(one)


@on_each_device
@on_each_layout
@pytest.mark.parametrize("num_common", [0, 5, 64, 68])
def test_a_prompt_that_turns_off_reuses_what_it_has_in_common(device, layout, num_common):
    engine = build(device, layout)
    ((output,),) = engine.generate_batch([turn(PROMPT, "s", 0)])
    before = engine.core.num_prefilled_tokens
    history = [*PROMPT, *output.token_ids]
    changed = [*history[:num_common], (history[num_common] + 1) % 50 + 3, 60, 61]
    asked = turn(changed, "s", 1)
    (found,) = engine.generate_batch([asked])
    num_new = engine.core.num_prefilled_tokens - before
    # A page that others may share is not written to.
    reused = num_common if layout == "KernelBatch" or num_common >= 64 else 0
    assert num_new == len(changed) - reused
    fresh = build(device, layout).generate_batch([dataclasses.replace(asked, session_ids=None)])
    assert_same(found, fresh[0])
    engine.core.close_session("s")
    assert_all_is_free(engine)


@on_each_device
def test_a_turn_too_long_for_the_slot_of_its_session_moves_to_another(device):
    """The prompt's slot has room for more of the next prompt; several move at once."""
    limits = {"max_num_seqs": 2, "max_response_tokens": 12}
    engine = build(device, "KernelBatch", **limits)
    histories = [PROMPT[:9], PROMPT[3:14]]
    for number, max_tokens in enumerate((4, 12, 12)):
        asked = [turn(ids, f"s{i}", number, max_tokens) for i, ids in enumerate(histories)]
        before = engine.core.num_prefilled_tokens
        found = [output for (output,) in engine.generate_batch(asked)]
        if number:
            assert engine.core.num_prefilled_tokens - before == 2 * (1 + len(REPLY))
        without = [dataclasses.replace(one, session_ids=None) for one in asked]
        fresh = build(device, "KernelBatch", **limits).generate_batch(without)
        assert_same(found, [output for (output,) in fresh])
        shared = [known.kept.num_shared for known in engine.core.sessions._sessions.values()]
        assert shared == [len(ids) for ids in histories], "whole prompts fit into prompt slots"
        histories = [
            [*ids, *output.token_ids, *REPLY] for ids, output in zip(histories, found, strict=True)
        ]
    engine.core.sessions.clear()
    assert_all_is_free(engine)


@on_each_device
@on_each_layout
def test_new_weights_sleep_and_failures_leave_nothing_behind(device, layout):
    version = [0]
    engine = build(device, layout)
    engine.core._version = lambda: version[0]
    play(engine, PROMPTS, 1)
    version[0] = 1
    play(engine, PROMPTS[:1], 1)
    assert len(engine.core.sessions) == 1, "those of the old weights are gone"
    engine.sleep()
    assert_all_is_free(engine)
    play(engine, PROMPTS, 1)
    engine.core.add(turn(PROMPT, "s0", 5))
    engine.core.step()
    rows = engine.core.batch.steps.table
    assert rows.num_tokens.any()
    engine.core._drop_all(RuntimeError("a step failed"))
    assert_all_is_free(engine)
    assert not rows.num_tokens.any(), "no row writes to memory that is another's next"
