"""Gradients of adapters: what they are, and that they do not depend on how rows are cut."""

import pytest
import torch

from tests.tiny_models import tiny_config, tiny_model
from tests.utils.two_ranks import run_on_two_ranks
from tests.workers.engine.test_one_device import SPLITS, batch, weighted_sum
from verl.config.engine import FSDPEngineConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.loading import random_causal_lm
from verl.models.lora import LoraOptions, add_lora, is_adapter, merged_copy
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.zero1 import Zero1Engine

LR, RANK, ALPHA = 0.1, 4, 12


def model_with_lora():
    """Adapters that differ from nothing, so that both factors have a gradient."""
    model = add_lora(tiny_model("llama"), LoraOptions(rank=RANK, alpha=ALPHA))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1, generator=generator)
    return model


def engine(build=model_with_lora, kind=OneDeviceEngine, **options):
    config = FSDPOptimizerConfig(lr=LR, optimizer="SGD", weight_decay=0.0)
    built = kind(build, config, max_grad_norm=1e9, **options)
    built.initialize()
    return built


def weights(built):
    return {name: p.detach().clone() for name, p in built.module.named_parameters()}


def gradients(built, split=SPLITS[0]):
    """From one step of plain gradient descent."""
    before = weights(built)
    built.train_batch(batch(), weighted_sum, micro_batching=split)
    return {name: (before[name] - w) / LR for name, w in weights(built).items()}


def test_adapters_have_the_gradient_that_the_chain_rule_gives_them():
    """W' = W + s B A, so dB = s G A^T and dA = s B^T G for the gradient G of W'."""
    start, found = dict(model_with_lora().named_parameters()), gradients(engine())
    whole = gradients(engine(lambda: merged_copy(model_with_lora()).requires_grad_(True)))
    scale, num_checked = ALPHA / RANK, 0
    for name, gradient in found.items():
        if not is_adapter(name):
            assert not gradient.any(), name
            continue
        layer = name.partition(".lora_")[0]
        down, up = (start[f"{layer}.lora_{factor}.default.weight"] for factor in "AB")
        G = whole[f"{layer}.weight"]
        expected = scale * G @ down.T if ".lora_B" in name else scale * up.T @ G
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=2e-5, msg=name)
        num_checked += bool(gradient.abs().max() > 1e-4)
    assert num_checked == 28  # two layers of seven, two factors each


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_does_not_depend_on_how_the_rows_are_cut(checkpointing):
    expected = gradients(engine())
    for split in SPLITS[1:]:
        found = gradients(engine(gradient_checkpointing=checkpointing), split)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=2e-5, msg=name)


PASSES = [[[0, 2], [4], [6]], [[1, 3], [5], []]]


def skeleton():
    with torch.device("meta"):
        return add_lora(random_causal_lm(tiny_config("llama")), LoraOptions(rank=RANK, alpha=ALPHA))


def on_ranks(kind):
    if kind is Zero1Engine:
        return engine(kind=Zero1Engine)
    return engine(
        kind=FSDPEngine,
        build_skeleton=skeleton,
        config=FSDPEngineConfig(),
        compute_dtype=torch.float32,
        device="cpu",
    )


def outcome(built, passes):
    """What two steps make of the merged weights, and log-probs with adapters and without."""
    built.train_batch(batch(), weighted_sum, micro_batching=passes)
    rows = [row for one in passes for row in one]
    with built.disable_adapter():
        bare = built.infer_batch(batch(), micro_batching=passes)["log_probs"][rows]
    built.train_batch(batch(), weighted_sum, micro_batching=passes)
    after = built.infer_batch(batch(), micro_batching=passes)["log_probs"][rows]
    merged = {name: w.detach().numpy().copy() for name, w in built.get_per_tensor_param()}
    return merged, after.numpy(), bare.numpy(), sorted(built.optimizer.masters)


def test_two_ranks_make_the_steps_of_one_however_they_divide_the_model(tmp_path):
    """With rows [0 2 4 6] on one rank, [1 3 5] and an empty pass on the other."""
    every = [row for passes in PASSES for one in passes for row in one]
    merged, after, bare, masters = outcome(engine(), [every])
    log_probs = [dict(zip(every, rows, strict=True)) for rows in (after, bare)]

    def work(rank):
        return [outcome(on_ranks(kind), PASSES[rank]) for kind in (Zero1Engine, FSDPEngine)]

    for rank, answers in enumerate(run_on_two_ranks(work, tmp_path)):
        rows = [row for one in PASSES[rank] for row in one]
        for found, *columns, trained in answers:
            assert trained == masters, "adapters alone are reduced over ranks"
            assert found.keys() == merged.keys()
            for name, value in merged.items():
                assert abs(found[name] - value).max() <= 1e-6, name
            for column, expected in zip(columns, log_probs, strict=True):
                assert (
                    max(abs(column[i] - expected[row]).max() for i, row in enumerate(rows)) < 1e-5
                )


def sparse_with_lora(on="cpu"):
    """A model of four experts whose adapters, theirs included, differ from nothing."""
    options = LoraOptions(rank=RANK, alpha=ALPHA, target_modules=["all-linear", "experts"])
    if on == "meta":
        with torch.device("meta"):
            return add_lora(random_causal_lm(tiny_config("qwen3_moe")), options)
    model = add_lora(tiny_model("qwen3_moe"), options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1, generator=generator)
    return model


def test_adapters_of_experts_make_the_same_steps_on_ranks_that_gather_or_spread_them(tmp_path):
    """Also in small passes; where experts are spread, each rank sees its own experts' factors."""
    every = [row for passes in PASSES for one in passes for row in one]
    merged, after, *_, masters = outcome(engine(sparse_with_lora), [every])
    assert any(".experts." in name for name in masters)
    again, _, _, _ = outcome(
        engine(sparse_with_lora, gradient_checkpointing=True), [[0, 5], [1, 2, 3, 4, 6]]
    )
    for name, value in merged.items():
        assert abs(again[name] - value).max() <= 2e-6, name

    def work(rank):
        engines = [
            engine(
                sparse_with_lora,
                FSDPEngine,
                build_skeleton=lambda: sparse_with_lora("meta"),
                config=FSDPEngineConfig(expert_parallel_size=size),
                compute_dtype=torch.float32,
                device="cpu",
            )
            for size in (1, 2)
        ]
        return [outcome(one, PASSES[rank]) for one in engines]

    log_probs = dict(zip(every, after, strict=True))
    for rank, answers in enumerate(run_on_two_ranks(work, tmp_path)):
        rows = [row for one in PASSES[rank] for row in one]
        for found, column, _, trained in answers:
            assert trained == masters
            assert found.keys() == merged.keys()
            for name, value in merged.items():
                assert abs(found[name] - value).max() <= 2e-6, name
            assert max(abs(column[i] - log_probs[row]).max() for i, row in enumerate(rows)) < 1e-5


def test_a_frozen_engine_stays_frozen_when_its_adapters_were_off():
    frozen = OneDeviceEngine(model_with_lora)
    frozen.initialize()
    whole = frozen.infer_batch(batch(), micro_batching=SPLITS[0])["log_probs"]
    with frozen.disable_adapter():
        bare = frozen.infer_batch(batch(), micro_batching=SPLITS[0])["log_probs"]
    plain = OneDeviceEngine(lambda: tiny_model("llama"))
    plain.initialize()
    with plain.disable_adapter():  # has none: nothing changes
        expected = plain.infer_batch(batch(), micro_batching=SPLITS[0])["log_probs"]
    assert torch.equal(bare, expected)
    assert not torch.equal(bare, whole)
    assert torch.equal(frozen.infer_batch(batch(), micro_batching=SPLITS[0])["log_probs"], whole)
    assert not any(p.requires_grad for p in frozen.module.parameters())


def test_adapters_are_on_again_after_an_error():
    built = engine()
    with pytest.raises(RuntimeError, match="broken"), built.disable_adapter():
        raise RuntimeError("broken")
    trained = {name for name, p in built.module.named_parameters() if p.requires_grad}
    assert trained == {name for name in weights(built) if is_adapter(name)}
    found, expected = gradients(built), gradients(engine())
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
