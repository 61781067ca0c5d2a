"""Prompts with images in the built-in engine: prefill with features, decode as text."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.models.test_vision import encoder, plain_inputs, prompt
from tests.tiny_vision import FAMILIES, ID, picture, plain_twin, tiny_vision_model
from tests.utils.two_ranks import run_on_two_ranks
from verl.models.exact import make_exact
from verl.protocol.padded import Padding, padded_batch
from verl.protocol.trajectory import Segment, Trajectory
from verl.workers.engine.forward import forward_rows
from verl.workers.engine.outputs import LOG_PROBS
from verl.workers.roles.dispatch import model_rows
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine

LIMITS = EngineLimits(max_num_seqs=8, max_prompt_tokens=120, max_response_tokens=40)


def engine(model, **options):
    return NativeEngine(model, LIMITS, eos_token_ids=[ID["</s>"]], **options)


def request(ids, media, *, num_samples=1, max_tokens=8, temperature=1.0, session=None, name="r"):
    return GenerationRequest(
        request_id=name,
        prompt_ids=ids,
        params=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=3),
        num_samples=num_samples,
        session_ids=None if session is None else (session,),
        media=tuple(media),
    )


def trajectory(ids, media, output, uid="a"):
    response = Segment(
        author="model",
        token_ids=output.token_ids,
        is_trained=True,
        log_probs=output.log_probs,
        parent=0,
    )
    segments = [Segment(author="template", token_ids=ids), response]
    return Trajectory(uid=uid, sample=0, row={"uid": uid}, segments=segments, media=tuple(media))


def sampled_rows(model, prompts, num_samples):
    """Trajectories of prompts with images, sampled by an engine."""
    requests = [
        request(ids, media, num_samples=num_samples, name=str(number))
        for number, (ids, media) in enumerate(prompts)
    ]
    found = engine(model).generate_batch(requests)
    return [
        trajectory(ids, media, output, uid=str(number))
        for number, ((ids, media), outputs) in enumerate(zip(prompts, found, strict=True))
        for output in outputs
    ]


def log_probs(model, trajectories, *, prefix_sharing=True, group=None):
    """Those of training, and those of the rollout."""
    padding = Padding(prompt_length=120, response_length=40, pad_token_id=0)
    batch = padded_batch(trajectories, padding)
    columns = forward_rows(
        model,
        model_rows(batch),
        device=torch.device("cpu"),
        temperature=1.0,
        is_value_model=False,
        prefix_sharing=prefix_sharing,
        outputs=LOG_PROBS,
        sequence_group=group,
    )
    return columns["log_probs"], batch.batch["rollout_log_probs"]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(tmp_path, family):
    model = tiny_vision_model(family)
    ids, media = encoder(tmp_path, family).encode_prompt(prompt(picture(1), picture(2, 16, 16)))
    ((output,),) = engine(model).generate_batch([request(ids, media, temperature=0.0)])
    twin = plain_twin(model, family)
    inputs = plain_inputs(family, ids, media)
    expected = twin.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=ID["</s>"])
    assert output.token_ids == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_rollout_are_those_of_training(tmp_path, family):
    model = tiny_vision_model(family)
    encode = encoder(tmp_path, family).encode_prompt
    prompts = [encode(prompt(picture(1))), encode(prompt(picture(2))), encode(prompt())]
    rows = sampled_rows(model, prompts, num_samples=3)
    for prefix_sharing in (True, False):
        ours, theirs = log_probs(model, rows, prefix_sharing=prefix_sharing)
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_ranks_that_share_a_model_or_the_tokens_of_rows_see_what_one_rank_sees(tmp_path):
    """Tensor-parallel rollout gives one rank's tokens; training with split tokens its log-probs
    and, summed over ranks, its gradient, of the tower too."""
    families = ["qwen2_5_vl", "idefics3"]
    prompts = {}
    for family in families:
        encode = encoder(tmp_path, family).encode_prompt
        prompts[family] = [encode(prompt(picture(1), picture(2))), encode(prompt())]

    def outcome(family, group=None):
        requests = [
            request(ids, media, num_samples=2, name=str(n))
            for n, (ids, media) in enumerate(prompts[family])
        ]
        found = engine(tiny_vision_model(family), tp_group=group).generate_batch(requests)
        rows = [
            trajectory(ids, media, output, uid=str(number))
            for number, ((ids, media), outputs) in enumerate(
                zip(prompts[family], found, strict=True)
            )
            for output in outputs
        ]
        model = tiny_vision_model(family)
        ours, theirs = log_probs(model, rows, group=group)
        ours.square().sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        tokens = [list(output.token_ids) for outputs in found for output in outputs]
        return (
            tokens,
            theirs.numpy(),
            ours.detach().numpy(),
            {n: g.numpy() for n, g in grads.items()},
        )

    def work(rank):
        del rank
        return [outcome(family, dist.group.WORLD) for family in families]

    answers = run_on_two_ranks(work, tmp_path)
    for number, family in enumerate(families):
        tokens, sampled, trained, grads = outcome(family)
        for found in answers:
            assert found[number][0] == tokens
            assert abs(found[number][1] - sampled).max() < 1e-5
            assert abs(found[number][2] - trained).max() < 1e-5
        towers = [name for name in grads if "visual" in name or "vision" in name]
        assert towers
        for name, expected in grads.items():
            total = sum(found[number][3].get(name, 0 * expected) for found in answers)
            assert abs(total - expected).max() <= 1e-3 * max(1.0, abs(expected).max()), name


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_exact_models_give_the_same_bits_in_rollout_and_training(tmp_path, family):
    model = make_exact(tiny_vision_model(family), capacity=160)
    encode = encoder(tmp_path, family).encode_prompt
    prompts = [encode(prompt(picture(1), picture(2))), encode(prompt(picture(3), words="Yes?"))]
    ours, theirs = log_probs(model, sampled_rows(model, prompts, num_samples=2))
    assert torch.equal(ours, theirs)


def test_images_decide_what_is_said_and_samples_share_one_tower_pass(tmp_path):
    model = tiny_vision_model()
    encode = encoder(tmp_path, "qwen2_vl").encode_prompt
    running = engine(model)
    said = [
        running.generate_batch([request(*encode(prompt(picture(seed))), num_samples=4)])[0]
        for seed in (1, 2, 1)
    ]
    texts = [[output.token_ids for output in outputs] for outputs in said]
    assert texts[0] == texts[2] != texts[1]
    assert running.core.runner.features.num_computed == 2


def test_the_next_turn_of_a_session_computes_new_tokens_only_and_its_image_counts(tmp_path):
    model = tiny_vision_model()
    encode = encoder(tmp_path, "qwen2_vl")
    ids, media = encode.encode_prompt(prompt(picture(1)))
    running = engine(model)
    ((first,),) = running.generate_batch([request(ids, media, session="s", max_tokens=4)])
    reply, shown = encode.place([ID["<|im_end|>"], ID["<|image_pad|>"], 40], [picture(5)])
    history = ids + first.token_ids
    longer = history + reply
    images = [*media, *(one.shifted(len(history)) for one in shown)]
    before = running.core.num_prefilled_tokens
    ((second,),) = running.generate_batch([request(longer, images, session="s", name="t")])
    assert running.core.num_prefilled_tokens - before == len(reply) + 1
    ((afresh,),) = engine(model).generate_batch([request(longer, images, name="t")])
    assert second.token_ids == afresh.token_ids
    ours, theirs = log_probs(model, [trajectory(longer, images, second)])
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_the_same_tokens_with_another_image_are_another_conversation(tmp_path):
    model = tiny_vision_model()
    encode = encoder(tmp_path, "qwen2_vl").encode_prompt
    (ids, media), (_, other) = encode(prompt(picture(1))), encode(prompt(picture(2)))
    running = engine(model)
    ((first,),) = running.generate_batch([request(ids, media, session="s", max_tokens=4)])
    longer = [*ids, *first.token_ids, 40]
    before = running.core.num_prefilled_tokens
    running.generate_batch([request(longer, other, session="s", name="t")])
    assert running.core.num_prefilled_tokens - before == len(longer) - int(media[0].places[0])


def test_a_sequence_that_starts_over_keeps_its_positions(tmp_path):
    """Weights that change in between make the engine compute prompt and response again."""
    model = tiny_vision_model()
    ids, media = encoder(tmp_path, "qwen2_vl").encode_prompt(prompt(picture(1), picture(2)))
    plain = engine(model).generate_batch([request(ids, media, max_tokens=12)])[0][0]
    running = engine(model)
    one = running.core.add(request(ids, media, max_tokens=12))
    running.core.step()
    with torch.no_grad():
        next(model.parameters()).add_(0.0)  # a write, of the same numbers
    while not one.is_finished:
        running.core.step()
    assert one.outputs[0].num_preempted == 1
    assert one.outputs[0].token_ids == plain.token_ids
    np.testing.assert_allclose(one.outputs[0].log_probs, plain.log_probs, atol=1e-5)
