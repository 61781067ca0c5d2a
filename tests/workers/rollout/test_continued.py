"""A request that is aborted and continued gives what it would have given in one piece."""

import dataclasses
import random
import threading

import pytest

from tests.agent_loop.fakes import FakeRollout
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from tests.workers.rollout.helpers import EOS, LIMITS, build_engine, request
from verl.models.exact import make_exact
from verl.workers.rollout.base import EngineLostError, SamplingParams, TokenOutput
from verl.workers.rollout.fleet import Fleet
from verl.workers.rollout.hf_rollout import HFRollout
from verl.workers.rollout.native.sequence import seeds_of_continuations, seeds_of_samples

CAPACITY = LIMITS.max_prompt_tokens + LIMITS.max_response_tokens
PROMPTS = [[5, 6, 7], [9], list(range(11, 21)), [30, 31]]
SETTINGS = {
    "plain": {},
    "filters": {"top_p": 0.8, "top_k": 20, "min_p": 0.01},
    "penalty": {"repetition_penalty": 1.6, "temperature": 0.7},
    "text": {"stop": ("never",), "ignore_eos": True},
    "greedy": {"temperature": 0.0},
}


def decode(ids):
    return str(tiny_tokenizer().decode(ids))


def exact_engine():
    model, limits = tiny_model("llama", scale=0.1), dataclasses.replace(LIMITS, tokens_per_step=2)
    return build_engine(make_exact(model, CAPACITY), limits, decode_text=decode)


def rest_of(whole, output: TokenOutput):
    """What is left of a request that was cut after `output`."""
    num = len(output.token_ids)
    params = dataclasses.replace(whole.params, max_tokens=whole.params.max_tokens - num)
    prompt_ids = [*whole.prompt_ids, *output.token_ids]
    return dataclasses.replace(
        whole, prompt_ids=prompt_ids, params=params, num_sampled=whole.num_sampled + num
    )


def joined(parts):
    """(ids, log-probs, versions, stop reason) of a response that came in parts."""
    columns = ("token_ids", "log_probs", "policy_versions")
    whole = [[value for part in parts for value in vars(part)[name]] for name in columns]
    return [*whole, parts[-1].stop_reason]


def cut_and_continued(core, whole, draws, session):
    """Run one request with aborts after random numbers of steps; other requests run beside it."""
    parts, left = [], dataclasses.replace(whole, session_ids=session)
    while not parts or parts[-1].stop_reason == "abort":
        if parts:
            left = rest_of(left, parts[-1])
        running = core.add(left)
        for _ in range(draws.randint(0, 3)):
            if not running.is_finished:
                core.step()
        core.abort(left.request_id)
        parts += running.outputs
    return parts


@pytest.mark.parametrize("settings", SETTINGS)
def test_in_exact_mode_a_continued_request_gives_the_bits_of_the_uncut_one(settings):
    engine, draws = exact_engine(), random.Random(settings)
    num_cuts = 0
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=16, seed=number, **SETTINGS[settings])
        whole = request(prompt, params)
        ((uncut,),) = engine.generate_batch([whole])
        if settings == "text":
            params = dataclasses.replace(params, stop=(decode(uncut.token_ids[9:11]),))
            whole = request(prompt, params)
            ((uncut,),) = engine.generate_batch([whole])
            assert uncut.stop_reason == "stop"
        beside = engine.core.add(request([40], SamplingParams(max_tokens=16), "beside"))
        session = ("s",) if number % 2 else None
        parts = cut_and_continued(engine.core, whole, draws, session)
        engine.core.abort_groups(beside.groups)
        assert joined(parts) == joined([uncut])
        num_cuts += len(parts) - 1
    assert num_cuts > 4


def test_a_text_that_began_before_the_cut_ends_the_response():
    engine = exact_engine()
    free = request([5], SamplingParams(max_tokens=12, seed=5, ignore_eos=True))
    ((output,),) = engine.generate_batch([free])
    text = decode(output.token_ids[5:7])
    stopped = dataclasses.replace(free, params=dataclasses.replace(free.params, stop=(text,)))
    ((uncut,),) = engine.generate_batch([stopped])
    assert uncut.stop_reason == "stop"
    assert len(uncut.token_ids) == 7
    first = TokenOutput(token_ids=uncut.token_ids[:6])
    ((second,),) = engine.generate_batch([rest_of(stopped, first)])
    assert (second.token_ids, second.stop_reason) == (uncut.token_ids[6:], "stop")


@pytest.mark.parametrize("num_sampled", [-1, 4])
def test_more_sampled_tokens_than_the_prompt_has_are_refused(num_sampled):
    with pytest.raises(ValueError, match=rf"num_sampled {num_sampled} and a prompt of 3 tokens"):
        build_engine().generate_batch(
            [request([5, 6, 7], SamplingParams(max_tokens=2), num_sampled=num_sampled)]
        )


def test_a_continued_response_ends_where_the_uncut_one_would():
    engine = build_engine()
    params = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)
    whole = request([5, 6], params)
    ((uncut,),) = engine.generate_batch([whole])
    first = TokenOutput(token_ids=uncut.token_ids[:10])
    ((second,),) = engine.generate_batch([rest_of(whole, first)])
    assert joined([second])[0] == uncut.token_ids[10:]
    assert len(uncut.token_ids) == 16
    with pytest.raises(ValueError, match="a response of 16 tokens, which has no room for more"):
        engine.generate_batch([rest_of(whole, uncut)])


def test_engines_that_count_tokens_anew_get_another_seed_for_each_cut():
    plain = request([5, 6, 7], SamplingParams(seed=3), num_samples=2)
    cuts = [dataclasses.replace(plain, num_sampled=number) for number in range(4)]
    seeds = [tuple(seeds_of_continuations(cut, 3)) for cut in cuts]
    assert list(seeds[0]) == seeds_of_samples(plain, 3)
    assert len({seed for pair in seeds for seed in pair}) == 8


# ---- abort through a fleet -----------------------------------------------------------------------


class Watched:
    """Counts the tokens of an engine by its steps, so that a cut can wait for some."""

    def __init__(self, core):
        self.has_stepped = threading.Event()
        self._step, core.step = core.step, self.step

    def step(self):
        self._step()
        self.has_stepped.set()


def test_a_fleet_aborts_what_runs_and_what_waits_and_a_rest_completes_it():
    engine = exact_engine()
    params = SamplingParams(max_tokens=16, seed=4, ignore_eos=True)
    wholes = [request([3 + n], params, f"r{n}", num_samples=4) for n in range(4)]
    expected = engine.generate_batch(wholes)
    fleet, watched = Fleet([engine]), Watched(engine.core)
    for whole, uncut in zip(wholes, expected, strict=True):
        watched.has_stepped.clear()
        running = fleet.submit(whole)
        assert watched.has_stepped.wait(60)
        fleet.abort([whole.request_id])
        for number, output in enumerate(running.result(60)):
            if output.stop_reason == "abort":
                # All four again: their seeds are derived from that of the request.
                (samples,) = engine.generate_batch([rest_of(whole, output)])
                assert joined([output, samples[number]]) == joined([uncut[number]])
            else:
                assert joined([output]) == joined([uncut[number]])
    engine.close()


def test_requests_that_no_engine_has_end_without_tokens():
    fleet = Fleet([engine := FakeRollout()])
    assert fleet.retire(engine)
    ended = []
    held = [
        fleet.submit(
            request([7], SamplingParams(), name, num_samples=2), lambda *end: ended.append(end[0])
        )
        for name in ("a", "b", "c")
    ]
    fleet.abort("unknown")
    fleet.abort({"a", "c"})
    for future in (held[0], held[2]):
        assert [joined([output]) for output in future.result(0)] == [[[], [], [], "abort"]] * 2
    assert ended == [0, 1, 0, 1]
    assert not held[1].done()
    fleet.abort()
    assert held[1].result(0)[0].stop_reason == "abort"


def test_an_aborted_request_whose_engine_is_lost_is_not_given_to_another():
    class Losing(FakeRollout):
        """Is lost when it is told to abort; one of two samples had ended by then."""

        def submit(self, request, on_end=None):
            self.future = super().submit(request).__class__()
            on_end(0, TokenOutput(token_ids=[5], stop_reason="stop"))
            return self.future

        def abort(self, request_id):
            self.future.set_exception(EngineLostError("it is gone"))

    other = FakeRollout()
    fleet = Fleet([Losing(), other])
    running = fleet.submit(request([7], SamplingParams(), num_samples=2))
    fleet.abort("r")
    outputs = running.result(60)
    assert [(output.token_ids, output.stop_reason) for output in outputs] == [
        ([5], "stop"),
        ([], "abort"),
    ]
    assert not other.requests
    assert not fleet.num_redispatched


def test_hf_ends_a_running_row_before_its_next_token():
    module = tiny_model("llama", scale=0.1)
    texts = []

    def decode_and_abort(ids):
        texts.append(ids)
        if len(texts) == 3:
            rollout.abort("cut")
        return decode(ids)

    rollout = HFRollout(
        module,
        max_num_seqs=4,
        max_prompt_tokens=12,
        max_response_tokens=16,
        eos_token_ids=[EOS],
        pad_token_id=0,
        decode_text=decode_and_abort,
    )
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    cut = request([5, 6], dataclasses.replace(params, stop=("never",)), "cut")
    with rollout.together():
        futures = [rollout.submit(cut), rollout.submit(request([7], params, "whole"))]
    (first,), (beside,) = (future.result(60) for future in futures)
    assert (len(first.token_ids), first.stop_reason) == (3, "abort")
    assert len(beside.token_ids) == 12
    ((second,),) = rollout.generate_batch([rest_of(cut, first)])
    ((uncut,),) = rollout.generate_batch([cut])
    assert first.token_ids + second.token_ids == uncut.token_ids
