"""SGLang through its process: over a server that speaks its protocol, and over the real one.

The real one needs VERL_SGLANG_PYTHON, the interpreter of an environment with SGLang.
"""

import asyncio
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from tests.tiny_models import VOCABULARY, plain_twin
from tests.workers.rollout.helpers import training_log_probs
from tests.workers.rollout.sglang.engines import (
    PROMPT,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    ask,
    changed,
    engine_options,
    named_weights,
    save_model,
    start_engine,
    trained_model,
)
from verl.utils.environment import sglang_python
from verl.workers.rollout.base import TokenOutput
from verl.workers.rollout.process.client import EngineProcess
from verl.workers.weight_sync import WeightsNotReadyError

SERVERS = [
    "protocol",
    pytest.param(
        "real",
        marks=[
            pytest.mark.slow,
            pytest.mark.timeout(600),
            pytest.mark.skipif(sglang_python() is None, reason="VERL_SGLANG_PYTHON is not set"),
        ],
    ),
]


@pytest.fixture(scope="module", params=SERVERS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """Embedding and head are tied, which is where updates of engines go wrong first."""
    folder = save_model(tmp_path_factory.mktemp("model"), "qwen2")
    engine = start_engine(engine_options(folder, is_real=request.param == "real"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def model(engine: EngineProcess) -> PreTrainedModel:
    """The policy in training, whose weights the engine has."""
    with pytest.raises(WeightsNotReadyError):  # it has seen no weights
        engine.generate_batch([ask()])
    model = trained_model("qwen2")
    engine.update_weights(named_weights(model), version=1)
    return model


def generate(engine: EngineProcess, **options) -> TokenOutput:
    ((output,),) = engine.generate_batch([ask(**options)])
    return output


def largest_difference(
    model: PreTrainedModel, prompt: list[int], output: TokenOutput, temperature: float = 1.0
) -> float:
    expected = training_log_probs(model, prompt, output.token_ids, temperature)
    return float((expected - torch.tensor(output.log_probs)).abs().max())


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    ids = plain_twin(model).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()


def test_it_says_what_it_is(engine, model):
    facts = engine.facts
    assert (facts.name, facts.version, facts.log_probs) == ("sglang", "0.5.23", "tempered")
    assert facts.max_model_len == PROMPT_LENGTH + RESPONSE_LENGTH
    assert not facts.can_sleep


def test_greedy_tokens_are_those_of_transformers(engine, model):
    output = generate(engine, temperature=0.0, max_tokens=24, ignore_eos=True)
    assert output.token_ids == greedy(model, PROMPT, 24)
    assert output.stop_reason == "length"
    assert largest_difference(model, PROMPT, output) < 1e-4


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_log_probs_are_those_of_training_at_the_temperature(engine, model, temperature):
    output = generate(engine, temperature=temperature, ignore_eos=True)
    assert largest_difference(model, PROMPT, output, temperature) < 1e-4
    assert largest_difference(model, PROMPT, output, 1.0) > 1e-2  # the two can be told apart


def test_filters_decide_what_is_drawn_and_leave_log_probs_alone(engine, model):
    output = generate(engine, temperature=1.3, top_k=3, top_p=0.8, min_p=0.02, ignore_eos=True)
    assert largest_difference(model, PROMPT, output, 1.3) < 1e-4
    logits = plain_twin(model)(torch.tensor([PROMPT + output.token_ids])).logits[0]
    likeliest = logits.topk(3).indices[len(PROMPT) - 1 :]
    for token, allowed in zip(output.token_ids, likeliest.tolist(), strict=False):
        assert token in allowed


def test_samples_of_a_request_differ_and_each_has_its_own_log_probs(engine, model):
    (outputs,) = engine.generate_batch([ask(num_samples=6, temperature=1.0)])
    assert len({tuple(output.token_ids) for output in outputs}) == 6
    for output in outputs:
        assert largest_difference(model, PROMPT, output) < 1e-4


def test_a_stop_token_ends_the_response_and_belongs_to_it(engine, model):
    whole = greedy(model, PROMPT, 24)
    place = next(i for i, token in enumerate(whole) if i > 2 and token not in whole[:i])
    for ignores in (False, True):  # which concerns the model's own tokens only
        output = generate(
            engine,
            temperature=0.0,
            max_tokens=24,
            stop_token_ids=(whole[place],),
            ignore_eos=ignores,
        )
        assert output.token_ids == whole[: place + 1]
        assert len(output.log_probs) == place + 1
        assert output.stop_reason == "stop"


@pytest.mark.slow  # the engine's process imports a tokenizer for it
def test_a_text_ends_the_response_with_the_token_that_completes_it(engine, model):
    whole = greedy(model, PROMPT, 24)
    tokenizer = AutoTokenizer.from_pretrained(engine.spec.options["arguments"]["model_path"])
    text = tokenizer.decode(whole[4:6])
    end = next(i for i in range(1, 25) if text in tokenizer.decode(whole[:i]))
    output = generate(engine, temperature=0.0, max_tokens=24, stop=(text,), ignore_eos=True)
    assert output.token_ids == whole[:end]
    assert output.stop_reason == "stop"


def test_what_cannot_run_is_refused_and_the_server_lives_on(engine, model):
    with pytest.raises(ValueError, match="vocabulary of 96"):
        engine.generate_batch([ask([5, VOCABULARY])])
    with pytest.raises(ValueError, match="prompt of 128 tokens"):
        engine.generate_batch([ask([5] * 128)])
    with pytest.raises(ValueError, match="SGLang takes 2"):
        engine.generate_batch([ask(repetition_penalty=2.5)])
    assert generate(engine, temperature=0.0).token_ids


def test_all_of_the_context_can_be_used(engine, model):
    prompt = [5 + i % 80 for i in range(PROMPT_LENGTH)]
    output = generate(engine, prompt=prompt, max_tokens=10_000, ignore_eos=True)
    assert len(output.token_ids) == RESPONSE_LENGTH
    assert output.stop_reason == "length"


def test_deltas_of_a_stream_add_up_to_the_response(engine, model):
    async def collect() -> list:
        request = ask(num_samples=2, temperature=0.0, max_tokens=24, ignore_eos=True)
        return [delta async for delta in engine.stream(request)]

    deltas = asyncio.run(collect())
    whole = greedy(model, PROMPT, 24)
    for sample in (0, 1):
        own = [delta for delta in deltas if delta.sample == sample]
        assert [token for delta in own for token in delta.token_ids] == whole
        assert len(own) > 1
        assert own[-1].stop_reason == "length"


def test_an_aborted_request_ends_with_what_it_has_and_others_go_on(engine, model):
    async def run() -> tuple[TokenOutput, TokenOutput]:
        long = ask(max_tokens=RESPONSE_LENGTH, ignore_eos=True)
        other = ask(temperature=0.0, max_tokens=24, ignore_eos=True)
        running = [asyncio.create_task(engine.generate(request)) for request in (long, other)]
        await asyncio.sleep(0)
        engine.abort(long.request_id)
        (aborted,), (whole,) = await asyncio.gather(*running)
        return aborted, whole

    aborted, whole = asyncio.run(run())
    assert aborted.stop_reason == "abort"
    assert len(aborted.token_ids) == len(aborted.log_probs) < RESPONSE_LENGTH
    assert whole.token_ids == greedy(model, PROMPT, 24)


def test_after_an_update_nothing_is_left_of_the_old_weights(engine, model):
    prompt = [5 + i % 80 for i in range(PROMPT_LENGTH)]  # longer than a page of its cache
    before = generate(engine, prompt=prompt, temperature=0.0, ignore_eos=True)
    changed(model, seed=7)
    engine.update_weights(named_weights(model), version=2)
    after = generate(engine, prompt=prompt, temperature=0.0, ignore_eos=True)
    assert after.token_ids == greedy(model, prompt, 12) != before.token_ids
    assert largest_difference(model, prompt, after) < 1e-4
    assert after.policy_versions == [2] * 12


def test_many_requests_at_once_are_all_answered(engine, model):
    requests = [ask([5, i], temperature=0.0, max_tokens=6, ignore_eos=True) for i in range(5, 45)]

    async def run() -> list[list[TokenOutput]]:
        return await asyncio.gather(*map(engine.generate, requests))

    answers = asyncio.run(run())
    for request, (output,) in zip(requests, answers, strict=True):
        assert largest_difference(model, list(request.prompt_ids), output) < 1e-4
        assert len(output.token_ids) == 6
