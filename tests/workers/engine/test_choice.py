"""Which engine a spec gets: a rank alone holds everything; several shard what must be sharded."""

from dataclasses import replace

import pytest
import torch

from tests.tiny_models import plain_twin, tiny_model
from tests.utils.two_ranks import run_on_two_ranks
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.registry import EngineRegistry, bytes_per_rank, should_shard_weights
from verl.workers.engine.spec import EngineSpec
from verl.workers.engine.zero1 import Zero1Engine

PASSES = [[[0, 2], [4, 6]], [[1, 3], [5]]]


def layer(num_weights, requires_grad=True):
    made = torch.nn.Linear(num_weights, 1, bias=False, device="meta")
    return made.requires_grad_(requires_grad)


def test_a_spec_asks_for_nothing_that_is_not_said():
    spec = EngineSpec(
        model=HFModelConfig(path="x"), engine=FSDPEngineConfig(), optimizer=None, device="cpu"
    )
    assert {name for name, value in vars(spec).items() if value is True} == set()


def test_bytes_of_a_rank_are_whole_weights_and_gradients_and_a_share_of_the_state():
    sizes = {"dtype": torch.bfloat16, "num_ranks": 4}
    assert bytes_per_rank(layer(100), is_trained=True, **sizes) == 200 + 200 + 1200 // 4
    assert bytes_per_rank(layer(100), is_trained=False, **sizes) == 200
    frozen_base = torch.nn.Sequential(layer(1000, requires_grad=False), layer(100))
    assert bytes_per_rank(frozen_base, is_trained=True, **sizes) == 2200 + 200 + 300


@pytest.mark.parametrize(
    ("sharding", "memory_bytes", "expected"),
    [
        ("auto", 1400, False),  # 700 bytes are half of it
        ("auto", 1399, True),
        ("zero1", 1, False),
        ("full", 1 << 40, True),
    ],
)
def test_weights_are_sharded_when_asked_for_or_when_one_rank_cannot_hold_them(
    sharding, memory_bytes, expected
):
    found = should_shard_weights(
        FSDPEngineConfig(sharding=sharding),
        layer(100),
        dtype=torch.bfloat16,
        is_trained=True,
        num_ranks=4,
        memory_bytes=memory_bytes,
    )
    assert found == expected


def built(path, sharding="auto", is_trained=True, is_value_model=False, **model):
    optimizer = FSDPOptimizerConfig(lr=0.05, optimizer="SGD", weight_decay=0.0)
    return EngineRegistry.new(
        EngineSpec(
            model=HFModelConfig(path=str(path), **model),
            engine=FSDPEngineConfig(sharding=sharding),
            optimizer=optimizer if is_trained else None,
            device="cpu",
            model_type="value_model" if is_value_model else "language_model",
        )
    )


def step(engine, passes):
    engine.train_batch(batch(), weighted_sum, micro_batching=passes)
    return {name: weight.detach().numpy() for name, weight in engine.get_per_tensor_param()}


def test_a_rank_alone_has_everything_on_its_device(tmp_path):
    plain_twin(tiny_model("llama")).save_pretrained(tmp_path)
    assert type(built(tmp_path, "full")) is OneDeviceEngine


def test_an_engine_of_ones_own_is_built_by_the_name_it_registered(tmp_path):
    class Counting(OneDeviceEngine):
        num_steps = 0

        def train_batch(self, *args, **kwargs):
            self.num_steps += 1
            return super().train_batch(*args, **kwargs)

    EngineRegistry.register(model_type="language_model", backend="counting", device="cpu")(Counting)
    plain_twin(tiny_model("llama")).save_pretrained(tmp_path)
    spec = EngineSpec(
        model=HFModelConfig(path=str(tmp_path)),
        engine=FSDPEngineConfig(),
        optimizer=FSDPOptimizerConfig(),
        device="cpu",
        backend="counting",
    )
    engine = EngineRegistry.new(spec)
    engine.train_batch(batch(), weighted_sum, micro_batching=[[0, 1], [2]])
    assert isinstance(engine, Counting)
    assert engine.num_steps == 1
    with pytest.raises(ValueError, match="Did you mean 'language_model/counting/cpu'"):
        EngineRegistry.new(replace(spec, backend="countin"))


def test_two_ranks_get_the_engine_that_was_asked_for_and_train_alike(tmp_path):
    plain_twin(tiny_model("qwen2")).save_pretrained(tmp_path)
    loras = ({}, {"lora_rank": 4, "lora_alpha": 8})
    expected = [step(built(tmp_path, **lora), [[0, 1, 2, 3, 4, 5, 6]]) for lora in loras]

    def work(rank):
        found = []
        for lora in loras:
            engines = [built(tmp_path, sharding, **lora) for sharding in ("auto", "full")]
            assert [type(engine) for engine in engines] == [Zero1Engine, FSDPEngine]
            found.append([step(engine, PASSES[rank]) for engine in engines])
        reference = built(tmp_path, "full", is_trained=False)
        assert not any(p.requires_grad for p in reference.module.parameters())
        reference.infer_batch(batch(), micro_batching=PASSES[rank])
        critic = built(tmp_path, "full", is_value_model=True)
        values = critic.infer_batch(batch(), micro_batching=PASSES[rank])["values"]
        assert not values.any(), "a new critic starts at zero"
        return found

    for answers in run_on_two_ranks(work, tmp_path):
        for weights_by_engine, one in zip(answers, expected, strict=True):
            for weights in weights_by_engine:
                assert weights.keys() == one.keys()
                for name, value in one.items():
                    assert abs(weights[name] - value).max() < 1e-6, name
