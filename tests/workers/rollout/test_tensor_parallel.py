"""Ranks that hold one model together generate what one rank generates that has it all."""

import pytest
import torch
import torch.distributed as dist

from tests.tiny_models import tiny_model
from tests.utils.one_rank import group_of_one
from tests.utils.two_ranks import run_on_ranks, run_on_two_ranks
from tests.workers.rollout.helpers import build_engine, request
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.native.sequence import EngineLimits

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
DRAWN = SamplingParams(seed=5, max_tokens=12, top_p=0.9, repetition_penalty=1.1)
CASES = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama with one key head": {"num_key_value_heads": 1},
    "qwen2": {},
    "gemma2": {},
    "phi": {},
    "phi3": {},
    "qwen3_moe": {},
    **{f"{name} with spread experts": {} for name in ("qwen3_moe", "deepseek_v3", "gpt_oss")},
}
MORE_CASES = {
    **{name: {} for name in ("qwen3", "mistral", "gemma", "gemma3_text", "smollm3", "olmo")},
    **{name: {} for name in ("olmo2", "mixtral", "mixtral with spread experts", "deepseek_v3")},
    "gemma2 with one key head": {"num_key_value_heads": 1},
}
FOUR_RANKS = {
    "llama": {},
    "qwen2": {},
    "phi3": {},
    "qwen3_moe": {},
    "qwen3_moe with spread experts": {},
    "qwen3 with 3 key heads": {"num_attention_heads": 12, "num_key_value_heads": 3},
}


def whole_model(name, changes):
    model = tiny_model(name.split()[0], **changes)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):  # they start at zero, where a mistake does not show
                parameter.normal_(0.0, 0.3, generator=generator)
    return model


def generated(name, changes, group=None):
    """What an engine says before and after it gets other weights."""
    spreads = name.endswith("spread experts")
    engine = build_engine(whole_model(name, changes), tp_group=group, spreads_experts=spreads)
    requests = [
        request([5, 6, 7], GREEDY, "greedy"),
        request([9, 8, 7, 6, 5], DRAWN, "drawn", num_samples=3),
        request([11], DRAWN, "short"),
    ]
    before = engine.generate_batch(requests)
    generator = torch.Generator().manual_seed(8)
    source = whole_model(name, changes)
    engine.update_weights(
        (key, weight.detach() + 0.1 * torch.randn(weight.shape, generator=generator))
        for key, weight in source.named_parameters()
    )
    after = engine.generate_batch(requests)
    return [plain(outputs) for outputs in (before, after)]


def plain(outputs):
    return [
        (output.token_ids, output.log_probs, output.stop_reason)
        for samples in outputs
        for output in samples
    ]


def assert_as_alone(name, changes, found):
    expected = generated(name, changes)
    assert expected[0] != expected[1], "the update did something"
    for before_and_after in found:
        for outputs, wanted in zip(before_and_after, expected, strict=True):
            for (ids, log_probs, reason), (all_ids, all_log_probs, all_reason) in zip(
                outputs, wanted, strict=True
            ):
                assert (ids, reason) == (all_ids, all_reason)
                assert log_probs == pytest.approx(all_log_probs, rel=0, abs=1e-5)
    assert all(rank == found[0] for rank in found), "the ranks say the same to the last bit"


def found_by(num_ranks, cases, folder):
    def work(rank):
        del rank
        return {name: generated(name, changes, dist.group.WORLD) for name, changes in cases.items()}

    return run_on_ranks(num_ranks, work, folder)


@pytest.fixture(scope="module")
def found_by_two(tmp_path_factory):
    return found_by(2, CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_generate_what_one_does(name, found_by_two):
    assert_as_alone(name, CASES[name], [found[name] for found in found_by_two])


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "cases"), [(2, MORE_CASES), (4, FOUR_RANKS)])
def test_more_models_and_ranks_generate_what_one_does(num_ranks, cases, tmp_path):
    answers = found_by(num_ranks, cases, tmp_path)
    for name, changes in cases.items():
        assert_as_alone(name, changes, [found[name] for found in answers])


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=pytest.mark.gpu)]
)
def test_collectives_are_part_of_a_step_on_every_device(device, backend, tmp_path):
    """On CUDA they are captured in the graph of the step."""
    requests = [
        request([5, 6, 7], SamplingParams(seed=2, max_tokens=12, ignore_eos=True), num_samples=3)
    ]
    expected = plain(build_engine(tiny_model("qwen2").to(device)).generate_batch(requests))
    with group_of_one(backend, tmp_path) as group:
        engine = build_engine(tiny_model("qwen2").to(device), tp_group=group)
        for _ in range(2):
            found = plain(engine.generate_batch(requests))
            assert [ids for ids, _, _ in found] == [ids for ids, _, _ in expected]
            for (_, log_probs, _), (_, wanted, _) in zip(found, expected, strict=True):
                assert log_probs == pytest.approx(wanted, rel=0, abs=1e-5)


def test_a_rank_keeps_its_share_of_weights_keys_and_values(tmp_path):
    alone = build_engine(tiny_model("llama"))

    def work(rank):
        del rank
        engine = build_engine(tiny_model("llama"), tp_group=dist.group.WORLD)
        layer = engine.core.runner.module.model.layers[0]
        shapes = [tuple(p.shape) for p in layer.self_attn.parameters()]
        return shapes, engine.core.cache.shape.bytes_per_token

    # 4 query heads and 2 key heads of 8 numbers each; of these a rank has the half.
    for shapes, num_bytes in run_on_two_ranks(work, tmp_path):
        assert shapes == [(16, 32), (8, 32), (8, 32), (32, 16)]
        assert 2 * num_bytes == alone.core.cache.shape.bytes_per_token


def test_a_rank_keeps_whole_experts_and_refuses_a_number_that_cannot_be_divided(tmp_path):
    def work(rank):
        del rank
        options = {"tp_group": dist.group.WORLD, "spreads_experts": True}
        engine = build_engine(tiny_model("qwen3_moe"), **options)
        experts = engine.core.runner.module.model.layers[1].mlp.experts
        whole = tiny_model("qwen3_moe").model.layers[1].mlp.experts
        own = vars(experts)["routing"].own_experts
        assert torch.equal(experts.down_proj, whole.down_proj[own.start : own.stop])
        for changes, reason in (({"num_experts": 3}, "3 experts"), (None, "has no experts")):
            model = tiny_model("llama") if changes is None else tiny_model("qwen3_moe", **changes)
            with pytest.raises(ValueError, match=reason):
                build_engine(model, **options)
        return own

    assert run_on_two_ranks(work, tmp_path) == [range(2), range(2, 4)]


def test_ranks_with_different_memory_run_as_many_sequences_as_the_smallest(tmp_path):
    def work(rank):
        limits = EngineLimits(
            max_num_seqs=8 - 3 * rank, max_prompt_tokens=12, max_response_tokens=16
        )
        engine = build_engine(tiny_model("llama"), limits, tp_group=dist.group.WORLD)
        outputs = engine.generate_batch([request([5, 6], DRAWN, num_samples=9)])
        return engine.core.cache.max_slots, plain(outputs)

    (slots, outputs), (other_slots, other_outputs) = run_on_two_ranks(work, tmp_path)
    assert slots == other_slots == 5
    assert outputs == other_outputs


def test_ranks_follow_the_tokens_of_the_first_even_if_their_logits_differ(tmp_path):
    def work(rank):
        model = tiny_model("llama")
        with torch.no_grad():  # the output head is whole on every rank
            model.lm_head.weight.add_(0.5 * rank)
            model.lm_head.weight[7 + rank] += 5.0
        engine = build_engine(model, tp_group=dist.group.WORLD)
        return plain(engine.generate_batch([request([5, 6], DRAWN, num_samples=4)]))

    outputs, other_outputs = run_on_two_ranks(work, tmp_path)
    assert outputs == other_outputs
