"""Generation with `generate` on the module that is trained: same answers, nothing left changed."""

import asyncio

import pytest
import torch

from tests.tiny_models import ARCHITECTURES, plain_twin, tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from tests.workers.rollout.helpers import EOS, build_engine, request, training_log_probs
from verl.models.attention import ATTENTION
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.hf_rollout import HFRollout

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [30, 31]]


def hf_rollout(model, **options):
    limits = {"max_num_seqs": 8, "max_prompt_tokens": 12, "max_response_tokens": 16}
    return HFRollout(model, eos_token_ids=[EOS], pad_token_id=0, **{**limits, **options})


def requests(params, num_samples=1, prompts=PROMPTS):
    return [
        request(ids, params, str(number), num_samples=num_samples)
        for number, ids in enumerate(prompts)
    ]


def tokens(outputs):
    return [[sample.token_ids for sample in samples] for samples in outputs]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_greedy_output_equals_that_of_the_built_in_engine(model_type):
    model = tiny_model(model_type)
    asked = requests(SamplingParams(temperature=0, max_tokens=12))
    expected = build_engine(model).generate_batch(asked)
    outputs = hf_rollout(model).generate_batch(asked)
    assert tokens(outputs) == tokens(expected)
    for (output,), (other,) in zip(outputs, expected, strict=True):
        assert output.stop_reason == other.stop_reason
        torch.testing.assert_close(
            torch.tensor(output.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-5
        )


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama", scale=0.05)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_p": 0.8},
        {"top_k": 5, "repetition_penalty": 1.3},
        {"min_p": 0.1, "temperature": 0.9},
    ],
)
def test_equal_seeds_draw_the_tokens_of_the_built_in_engine(llama, options):
    params = SamplingParams(max_tokens=8, seed=3, log_probs="raw", **options)
    asked = requests(params, num_samples=2)
    outputs = hf_rollout(llama).generate_batch(asked)
    assert tokens(outputs) == tokens(build_engine(llama).generate_batch(asked))
    for prompt, samples in zip(PROMPTS, outputs, strict=True):
        for output in samples:
            expected = training_log_probs(
                llama, prompt, output.token_ids, options.get("temperature", 1.0)
            )
            torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("build", [build_engine, hf_rollout])
def test_processed_log_probs_are_renormalized_over_what_the_filters_leave(llama, build):
    params = SamplingParams(max_tokens=8, seed=3, temperature=0.7, top_k=2)
    (output,) = build(llama).generate_batch([request(PROMPTS[0], params, "a")])[0]
    inputs = torch.tensor([PROMPTS[0] + output.token_ids])
    logits = plain_twin(llama)(inputs).logits[0, len(PROMPTS[0]) - 1 : -1] / 0.7
    likeliest, which = logits.double().topk(2)
    drawn = which == torch.tensor(output.token_ids)[:, None]
    expected = likeliest.log_softmax(-1)[drawn]
    torch.testing.assert_close(torch.tensor(output.log_probs).double(), expected, rtol=0, atol=1e-5)


def test_rows_with_other_options_and_limits_run_side_by_side_as_they_do_alone(llama):
    asked = [
        request([5, 6, 7], SamplingParams(temperature=0, max_tokens=9), "greedy"),
        request([9], SamplingParams(temperature=0.7, seed=1, max_tokens=3), "short"),
        request(PROMPTS[2], SamplingParams(top_k=4, seed=2, max_tokens=100), "long"),
    ]
    together = hf_rollout(llama, max_num_seqs=3).generate_batch(asked)
    alone = hf_rollout(llama, max_num_seqs=1).generate_batch(asked)
    assert tokens(together) == tokens(alone)
    lengths = [len(samples[0].token_ids) for samples in together]
    assert lengths[:2] == [9, 3]
    assert lengths[2] <= 16
    assert [samples[0].stop_reason for samples in together][1] == "length"


def test_a_stop_text_or_token_ends_its_own_row_and_is_kept(llama):
    tokenizer = tiny_tokenizer()
    free = SamplingParams(seed=5, max_tokens=10, ignore_eos=True)
    (output,) = hf_rollout(llama).generate_batch([request([5, 6], free)])[0]
    third = output.token_ids[2]
    rollout = hf_rollout(llama, decode_text=lambda ids: str(tokenizer.decode(ids)))
    by_token = SamplingParams(seed=5, max_tokens=10, ignore_eos=True, stop_token_ids=(third,))
    by_text = SamplingParams(
        seed=5, max_tokens=10, ignore_eos=True, stop=(str(tokenizer.decode([third])),)
    )
    stopped = rollout.generate_batch(
        [request([5, 6], params, name) for name, params in (("a", by_token), ("b", by_text))]
        + [request([5, 6], free, "c")]
    )
    first = output.token_ids.index(third) + 1
    assert [s[0].token_ids for s in stopped[:2]] == [output.token_ids[:first]] * 2
    assert [s[0].stop_reason for s in stopped] == ["stop", "stop", "length"]
    assert stopped[2][0].token_ids == output.token_ids


def test_the_module_is_as_before_and_its_own_generation_options_have_no_say(llama):
    llama.generation_config.repetition_penalty = 5.0
    llama.generation_config.max_length = 4
    options = llama.generation_config
    storage = [parameter.data_ptr() for parameter in llama.parameters()]
    llama.train()
    llama.lm_head.eval()
    asked = requests(SamplingParams(temperature=0, max_tokens=6))
    try:
        outputs = hf_rollout(llama).generate_batch(asked)
        assert llama.training
        assert not llama.lm_head.training
    finally:
        llama.eval()
    assert tokens(outputs) == tokens(build_engine(llama).generate_batch(asked))
    assert llama.generation_config is options
    assert llama.config._attn_implementation == ATTENTION
    assert [parameter.data_ptr() for parameter in llama.parameters()] == storage
    assert all(parameter.grad is None for parameter in llama.parameters())


def test_the_module_is_as_before_after_a_failure_and_every_caller_hears_of_it(llama):
    def broken(ids):
        raise RuntimeError("no such token")

    rollout = hf_rollout(llama, decode_text=broken)
    params = SamplingParams(stop=("x",), max_tokens=4)

    async def ask():
        return await asyncio.gather(
            *(rollout.generate(asked) for asked in requests(params)), return_exceptions=True
        )

    assert [str(error) for error in asyncio.run(ask())] == ["no such token"] * len(PROMPTS)
    assert llama.config._attn_implementation == ATTENTION
    (output,) = rollout.generate_batch([request([5], SamplingParams(max_tokens=2))])[0]
    assert output.token_ids


def test_tokens_follow_new_weights_and_carry_their_version():
    model, version = tiny_model("llama"), 3
    rollout = hf_rollout(model, version=lambda: version)
    asked = [request([5, 6], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))]
    (before,) = rollout.generate_batch(asked)[0]
    with torch.no_grad():
        model.lm_head.weight.neg_()
    version = 4
    (after,) = rollout.generate_batch(asked)[0]
    assert before.policy_versions == [3] * 4
    assert after.policy_versions == [4] * 4
    assert after.token_ids != before.token_ids


def test_callers_who_wait_together_run_together_and_an_aborted_one_gets_nothing(llama):
    rollout = hf_rollout(llama)
    asked = requests(SamplingParams(seed=2, max_tokens=5, ignore_eos=True))

    async def ask():
        tasks = [asyncio.ensure_future(rollout.generate(one)) for one in asked]
        await asyncio.sleep(0)
        rollout.abort("1")
        tasks[2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outputs = asyncio.run(ask())
    expected = tokens(rollout.generate_batch(asked))
    assert outputs[1][0].stop_reason == "abort"
    assert outputs[1][0].token_ids == []
    assert isinstance(outputs[2], asyncio.CancelledError)
    assert [outputs[i][0].token_ids for i in (0, 3)] == [expected[i][0] for i in (0, 3)]


def test_what_cannot_run_is_refused_by_name(llama):
    rollout = hf_rollout(llama)
    with pytest.raises(ValueError, match="room for 28"):
        rollout.generate_batch([request([5] * 28, SamplingParams())])
    with pytest.raises(ValueError, match="no tokenizer"):
        rollout.generate_batch([request([5], SamplingParams(stop=("x",)))])
