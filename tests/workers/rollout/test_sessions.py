"""Conversations: only new tokens are computed, and the numbers are those of computing all."""

import pytest
import torch

from tests.tiny_models import tiny_model
from tests.workers.rollout.helpers import build_engine, request, training_log_probs
from verl.models.exact import make_exact
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.native.engine import EngineLimits

LIMITS = EngineLimits(max_num_seqs=4, max_prompt_tokens=8, max_response_tokens=32)
TOOL_OUTPUT = [50, 51, 52]


def turn(prompt, session="s", *, max_tokens=6, seed=1):
    params = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    return request(prompt, params, session_ids=(session,))


def talk(engine, num_turns, session="s", prompt=(5, 6, 7)):
    """Each turn: the model speaks, a tool answers. Gives (prompt, output) of every turn."""
    history, turns = list(prompt), []
    for number in range(num_turns):
        ((output,),) = engine.generate_batch([turn(history, session, seed=number)])
        turns.append((list(history), output))
        history = history + output.token_ids + TOOL_OUTPUT
    return turns


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_a_conversation_computes_only_new_tokens_and_gives_the_same_numbers(model_type):
    model = tiny_model(model_type, scale=0.02)
    engine = build_engine(model, LIMITS)
    turns = talk(engine, 4)
    # The first prompt, then each time the tool's three tokens and the one said last.
    assert engine.core.num_prefilled_tokens == 3 + 3 * (3 + 1)
    for prompt, output in turns:
        expected = training_log_probs(model, prompt, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-6)
        params = SamplingParams(max_tokens=6, seed=turns.index((prompt, output)), ignore_eos=True)
        ((fresh,),) = build_engine(model, LIMITS).generate_batch([request(prompt, params)])
        assert fresh.token_ids == output.token_ids


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_in_exact_mode_a_conversation_gives_the_same_bits(model_type):
    model = make_exact(tiny_model(model_type), 40)
    engine = build_engine(model, LIMITS)
    for prompt, output in talk(engine, 4):
        expected = training_log_probs(model, prompt, output.token_ids)
        assert torch.equal(torch.tensor(output.log_probs), expected)
    assert engine.core.num_prefilled_tokens == 3 + 3 * (3 + 1)


def test_the_samples_of_one_prompt_go_on_as_conversations_of_their_own():
    engine = build_engine(limits=LIMITS)
    params = SamplingParams(max_tokens=5, seed=2, ignore_eos=True)
    (samples,) = engine.generate_batch(
        [request([5, 6, 7], params, num_samples=3, session_ids=("a", "b", "c"))]
    )
    assert engine.core.num_prefilled_tokens == 3
    second = [
        turn([5, 6, 7, *output.token_ids, 50], session)
        for session, output in zip("abc", samples, strict=True)
    ]
    outputs = engine.generate_batch(second)
    assert engine.core.num_prefilled_tokens == 3 + 3 * 2
    for asked, (output,) in zip(second, outputs, strict=True):
        ((fresh,),) = build_engine(limits=LIMITS).generate_batch(
            [request(asked.prompt_ids, asked.params)]
        )
        assert output.token_ids == fresh.token_ids


def test_a_prompt_that_turns_off_uses_what_it_has_in_common():
    engine = build_engine(limits=LIMITS)
    ((output,),) = engine.generate_batch([turn([5, 6, 7, 8])])
    before = engine.core.num_prefilled_tokens
    other = [5, 6, 7, 9, 10]  # three tokens in common
    ((changed,),) = engine.generate_batch([turn(other)])
    assert engine.core.num_prefilled_tokens - before == 2
    expected = training_log_probs(engine.core.runner.module, other, changed.token_ids)
    torch.testing.assert_close(torch.tensor(changed.log_probs), expected, rtol=0, atol=2e-6)
    assert len(output.token_ids) == 6


def test_the_same_prompt_again_computes_its_last_token():
    engine = build_engine(limits=LIMITS)
    first, second = (engine.generate_batch([turn([5, 6, 7])])[0][0] for _ in range(2))
    assert engine.core.num_prefilled_tokens == 3 + 1
    assert first.token_ids == second.token_ids


def test_new_weights_make_everything_kept_worthless():
    model, version = tiny_model("llama", scale=0.02), [0]
    engine = build_engine(model, LIMITS, version=lambda: version[0])
    ((output,),) = engine.generate_batch([turn([5, 6, 7])])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    version[0] = 1
    before = engine.core.num_prefilled_tokens
    prompt = [5, 6, 7, *output.token_ids, 50]
    ((after,),) = engine.generate_batch([turn(prompt)])
    assert engine.core.num_prefilled_tokens - before == len(prompt)
    expected = training_log_probs(model, prompt, after.token_ids)
    torch.testing.assert_close(torch.tensor(after.log_probs), expected, rtol=0, atol=1e-6)


def test_a_new_version_counts_even_if_no_weight_was_written():
    version = [0]
    engine = build_engine(limits=LIMITS, version=lambda: version[0])
    ((output,),) = engine.generate_batch([turn([5, 6, 7])])
    version[0] = 1
    engine.generate_batch([turn([5, 6, 7, *output.token_ids])])
    assert engine.core.num_prefilled_tokens == 3 + 9


def test_a_closed_session_is_forgotten_and_closing_an_unknown_one_is_no_error():
    engine = build_engine(limits=LIMITS)
    ((output,),) = engine.generate_batch([turn([5, 6, 7])])
    assert engine.core.sessions.num_bytes == 256 * 8  # all but the last token
    engine.close_session("s")
    engine.close_session("never seen")
    with engine.paused():
        assert engine.core.sessions.num_bytes == 0
    engine.generate_batch([turn([5, 6, 7, *output.token_ids])])
    assert engine.core.num_prefilled_tokens == 3 + 9


def test_memory_goes_to_the_conversations_used_last():
    # Eight tokens of 256 bytes are kept of each: there is room for two.
    limits = EngineLimits(
        max_num_seqs=4, max_prompt_tokens=8, max_response_tokens=32, max_session_bytes=256 * 17
    )
    engine = build_engine(limits=limits)
    for session in ("a", "b", "c"):
        engine.generate_batch([turn([5, 6, 7], session)])
    assert len(engine.core.sessions) == 2
    assert engine.core.sessions.num_bytes == 2 * 256 * 8
    before = engine.core.num_prefilled_tokens
    for session in ("b", "c", "a"):
        engine.generate_batch([turn([5, 6, 7], session)])
    assert engine.core.num_prefilled_tokens - before == 1 + 1 + 3


def test_of_more_conversations_than_memory_keeps_those_that_have_begun_end_first():
    """Each answers at once; there is memory for three that wait, and two run at a time."""
    limits = EngineLimits(
        max_num_seqs=2, max_prompt_tokens=8, max_response_tokens=64, max_session_bytes=256 * 3 * 40
    )
    core = build_engine(limits=limits).core
    turns_left = {str(number): 4 for number in range(12)}
    for session in turns_left:
        core.add(turn([5, 6, 7], session))
    while core.has_unfinished:
        core.step()
        for sample in core.take_ended():
            turns_left[sample.session_id] -= 1
            if turns_left[sample.session_id]:
                core.add(turn(sample.token_ids + TOOL_OUTPUT, sample.session_id))
            else:
                core.close_session(sample.session_id)
    assert not any(turns_left.values())
    assert core.num_prefilled_tokens == 12 * (3 + 3 * (3 + 1))


def test_a_turn_too_long_to_be_kept_is_simply_computed_again():
    limits = EngineLimits(
        max_num_seqs=4, max_prompt_tokens=8, max_response_tokens=32, max_session_bytes=256 * 7
    )
    engine = build_engine(limits=limits)
    engine.generate_batch([turn([5, 6, 7])])
    assert len(engine.core.sessions) == 0


def test_sleep_keeps_nothing_and_an_abort_what_a_continued_request_needs():
    engine = build_engine(limits=LIMITS)
    engine.generate_batch([turn([5, 6, 7])])
    engine.sleep()
    assert engine.core.sessions.num_bytes == 0
    engine.core.add(turn([5, 6, 7], max_tokens=20))
    engine.core.abort("r")  # before it has begun
    assert len(engine.core.sessions) == 0
    running = engine.core.add(turn([5, 6, 7], max_tokens=20))
    engine.core.step()
    engine.core.abort("r")
    assert len(engine.core.sessions) == 1
    before = engine.core.num_prefilled_tokens
    engine.generate_batch([turn([5, 6, 7, *running.outputs[0].token_ids])])
    assert engine.core.num_prefilled_tokens == before + 1
