"""Ranks that hold a part of every weight make the step that one rank makes."""

from copy import deepcopy

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from tests.tiny_models import tiny_config, tiny_model
from tests.utils.two_ranks import run_on_ranks, run_on_two_ranks
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.engine import FSDPEngineConfig, WrapPolicyConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.loading import random_causal_lm
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.memory import MemoryOptions
from verl.workers.engine.one_device import OneDeviceEngine


def skeleton(model):
    with torch.device("meta"):
        return random_causal_lm(tiny_config(model))


def optimizer(name="SGD"):
    momentum = {"momentum": 0.9} if name == "SGD" else None
    return FSDPOptimizerConfig(
        lr=0.05 if momentum else 0.01,
        optimizer=name,
        weight_decay=0.1,
        override_optimizer_config=momentum,
    )


def on_one_device(model, **options):
    engine = OneDeviceEngine(lambda: tiny_model(model), optimizer(), max_grad_norm=0.5, **options)
    engine.initialize()
    return engine


def sharded(model, config=None, optimizer_name="SGD", **options):
    engine = FSDPEngine(
        lambda: tiny_model(model),
        optimizer(optimizer_name),
        build_skeleton=lambda: skeleton(model),
        config=config or FSDPEngineConfig(),
        compute_dtype=torch.float32,
        device="cpu",
        max_grad_norm=0.5,
        **options,
    )
    engine.initialize()
    return engine


def whole_weights(engine):
    return {name: w.detach().numpy().copy() for name, w in engine.get_per_tensor_param()}


def two_steps(engine, passes):
    results = [engine.train_batch(batch(), weighted_sum, micro_batching=passes) for _ in range(2)]
    return [r.loss for r in results], [r.grad_norm for r in results], whole_weights(engine)


PASSES = [[[0, 2], [4], [6]], [[1, 3], [5], []]]
ALL_PASSES = [[0, 1, 2], [3, 4], [5, 6]]


def assert_same(found, expected, tolerance=1e-6):
    for answer in (found, expected):
        assert len(answer[2]) == len(expected[2])
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    for key, value in expected[2].items():
        assert abs(found[2][key] - value).max() < tolerance, key


def check_models(models, tmp_path):
    expected = [two_steps(on_one_device(model), ALL_PASSES) for model in models]

    def work(rank):
        return [two_steps(sharded(model), PASSES[rank]) for model in models]

    for answers in run_on_two_ranks(work, tmp_path):
        for found, one in zip(answers, expected, strict=True):
            assert_same(found, one)


def test_two_ranks_make_the_steps_of_one_with_tied_weights_and_with_experts(tmp_path):
    check_models(["qwen2", "qwen3_moe"], tmp_path)


@pytest.mark.slow
def test_two_ranks_make_the_steps_of_one_for_other_kinds_of_models(tmp_path):
    check_models(["llama", "mixtral", "gemma3_text", "gpt_oss", "phi3"], tmp_path)


def check_options(options, tmp_path):
    expected = two_steps(on_one_device("llama"), ALL_PASSES)

    def work(rank):
        return [two_steps(sharded("llama", **option), PASSES[rank]) for option in options]

    for answers in run_on_two_ranks(work, tmp_path):
        for found in answers:
            assert_same(found, expected)


def test_kept_weights_and_recomputed_activations_change_nothing_about_the_steps(tmp_path):
    kept = FSDPEngineConfig(reshard_after_forward=False)
    check_options([{"config": kept}, {"gradient_checkpointing": True}], tmp_path)


@pytest.mark.parametrize("name", ["offload_policy", "param_offload", ""])
def test_weights_wait_in_cpu_memory_if_asked_for(tmp_path, name):
    """On a CPU nothing else tells."""

    def work(rank):
        config = FSDPEngineConfig(**({name: True} if name else {}))
        units = [m for m in sharded("llama", config).module.modules() if isinstance(m, FSDPModule)]
        policies = [m._get_fsdp_state()._fsdp_param_group.offload_policy for m in units]
        return [isinstance(policy, CPUOffloadPolicy) for policy in policies]

    for found in run_on_two_ranks(work, tmp_path):
        assert set(found) == {bool(name)}


@pytest.mark.slow
def test_other_options_change_nothing_about_the_steps(tmp_path):
    configs = {
        "weights wait in CPU memory": FSDPEngineConfig(offload_policy=True),
        "the next layer is gathered early": FSDPEngineConfig(forward_prefetch=True),
        "each rank has a copy": FSDPEngineConfig(fsdp_size=1),
    }
    options = [{"config": config} for config in configs.values()]
    options.append({"memory": MemoryOptions(optimizer_offload=True)})
    check_options(options, tmp_path)


def test_only_the_first_rank_loads_and_each_holds_half(tmp_path):
    def work(rank):
        loads = []

        def load():
            loads.append(rank)
            return tiny_model("qwen2")

        engine = FSDPEngine(
            load,
            optimizer("AdamW"),
            build_skeleton=lambda: skeleton("qwen2"),
            config=FSDPEngineConfig(),
            compute_dtype=torch.float32,
            device="cpu",
        )
        engine.initialize()
        whole = sum(p.numel() for p in tiny_model("qwen2").parameters())
        held = sum(p.to_local().numel() for p in engine.module.parameters())
        assert held == whole / 2
        assert sum(m.numel() for m in engine.optimizer.masters.values()) == whole / 2
        start = dict(tiny_model("qwen2").named_parameters())
        for name, weight in engine.get_per_tensor_param():
            assert torch.equal(weight, start.pop(name)), name
        assert not start, "every weight is there, the tied one once"
        return loads

    assert run_on_two_ranks(work, tmp_path) == [[0], []]


def test_log_probs_are_those_of_one_rank_and_rows_in_no_pass_are_zero(tmp_path):
    data = batch()
    expected = on_one_device("qwen2").infer_batch(data, micro_batching=ALL_PASSES, temperature=0.7)
    expected = expected["log_probs"].numpy()

    def work(rank):
        engine = sharded("qwen2", FSDPEngineConfig(reshard_after_forward=False))
        found = engine.infer_batch(data, micro_batching=PASSES[rank], temperature=0.7)
        list(engine.get_per_tensor_param())  # the weights are sharded again
        with pytest.raises(ValueError, match="give the passes of a plan for all ranks"):
            engine.infer_batch(data, micro_batching=MicroBatching(rows=2))
        return found["log_probs"].numpy().copy()

    parts = run_on_two_ranks(work, tmp_path)
    own = [sorted(row for rows in passes for row in rows) for passes in PASSES]
    for rank, part in enumerate(parts):
        assert abs(part[own[rank]] - expected[own[rank]]).max() < 1e-5
        assert not part[own[1 - rank]].any()


def test_a_gradient_that_is_not_finite_on_one_rank_is_applied_on_none(tmp_path):
    def work(rank):
        engine = sharded("llama")
        before = whole_weights(engine)

        def loss(columns, rows):
            found, report = weighted_sum(columns, rows)
            return found * (torch.nan if rank == 1 else 1.0), report

        result = engine.train_batch(batch(), loss, micro_batching=PASSES[rank])
        after = whole_weights(engine)
        return result.is_applied, all((before[name] == after[name]).all() for name in before)

    assert run_on_two_ranks(work, tmp_path) == [(False, True), (False, True)]


def test_a_rank_resumes_from_its_own_part_of_the_state(tmp_path):
    def work(rank):
        first, second = (sharded("qwen2", optimizer_name="AdamW") for _ in range(2))
        two_steps(first, PASSES[rank])
        state = deepcopy(first.state_dict())
        moment = state["optimizer"]["optimizer"]["state"][0]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert moment.shape == (96, 32)
        assert moment.to_local().shape == (48, 32)
        second.load_state_dict(state)
        a, b = two_steps(first, PASSES[rank]), two_steps(second, PASSES[rank])
        return a[:2] == b[:2], all((a[2][name] == b[2][name]).all() for name in a[2])

    assert run_on_two_ranks(work, tmp_path) == [(True, True)] * 2


def test_weights_stored_in_bf16_have_fp32_masters(tmp_path):
    def work(rank):
        engine = FSDPEngine(
            lambda: tiny_model("llama").to(torch.bfloat16),
            FSDPOptimizerConfig(lr=1e-4, weight_decay=0.0),
            build_skeleton=lambda: skeleton("llama").to(torch.bfloat16),
            config=FSDPEngineConfig(),
            compute_dtype=torch.bfloat16,
            device="cpu",
        )
        engine.initialize()
        engine.train_batch(batch(), weighted_sum, micro_batching=PASSES[rank])
        weight = engine.module.model.norm.weight.to_local()
        master = engine.optimizer.masters["model.norm.weight"]
        assert master.dtype == torch.float32
        assert (weight == 1.0).all()  # too small a step for bf16
        assert (master != 1.0).any()  # which the master remembers

    run_on_two_ranks(work, tmp_path)


def test_what_cannot_be_divided_is_refused(tmp_path):
    def work(rank):
        with pytest.raises(ValueError, match="fsdp_size is 3, but 2 ranks"):
            sharded("llama", FSDPEngineConfig(fsdp_size=3))
        with pytest.raises(ValueError, match="min_num_params is 5"):
            sharded("llama", FSDPEngineConfig(wrap_policy=WrapPolicyConfig(min_num_params=5)))
        with pytest.raises(ValueError, match="Muon, which looks at whole matrices"):
            sharded("llama", optimizer_name="Muon")
        with pytest.raises(ValueError, match="enable_gradient_checkpointing=True"):
            sharded("llama", memory=MemoryOptions(activation_offload=True))

    run_on_two_ranks(work, tmp_path)


@pytest.mark.slow
def test_two_copies_of_two_parts_each_make_the_steps_of_one(tmp_path):
    expected = two_steps(on_one_device("qwen2"), ALL_PASSES)
    shares = [[[0, 2], []], [[1], [3]], [[4, 5], []], [[6], []]]

    def work(rank):
        return [
            two_steps(sharded("qwen2", config), shares[rank])
            for config in (
                FSDPEngineConfig(fsdp_size=2),
                FSDPEngineConfig(fsdp_size=2, reshard_after_forward=False),
                FSDPEngineConfig(),
            )
        ]

    for answers in run_on_ranks(4, work, tmp_path):
        for found in answers:
            assert_same(found, expected)


SPREAD = FSDPEngineConfig(expert_parallel_size=2)


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
def test_experts_spread_over_ranks_make_the_step_of_one_rank(tmp_path, model):
    """Weights, norm and loss; recomputed layers exchange rows once more; state goes on."""
    expected = two_steps(on_one_device(model), ALL_PASSES)

    def work(rank):
        engine = sharded(model, SPREAD, gradient_checkpointing=True)
        experts = [p for n, p in engine.module.named_parameters() if n.endswith("gate_up_proj")]
        assert all(p.to_local().shape[0] == p.shape[0] // 2 for p in experts)
        found = two_steps(engine, PASSES[rank])
        other = sharded(model, SPREAD)
        other.load_state_dict(engine.state_dict())
        assert other.policy_version == 2
        return found

    for found in run_on_two_ranks(work, tmp_path):
        assert_same(found, expected, tolerance=2e-6)


@pytest.mark.parametrize(
    ("model", "size", "reason"), [("llama", 2, "0 layers"), ("qwen3_moe", 3, "set it to 1 or 2")]
)
def test_experts_that_cannot_be_spread_are_refused(tmp_path, model, size, reason):
    def work(rank):
        with pytest.raises(ValueError, match=reason):
            sharded(model, FSDPEngineConfig(expert_parallel_size=size))

    run_on_two_ranks(work, tmp_path)
