"""A run continues on as many ranks as it was saved on bit for bit, and on others all the same."""

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import tiny_config, tiny_model
from tests.utils.two_ranks import run_on_ranks, run_on_two_ranks
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.engine import FSDPEngineConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.trainer import CheckpointConfig
from verl.models.loading import random_causal_lm
from verl.utils.checkpoint.fsdp_checkpoint_manager import checkpoint_manager
from verl.utils.checkpoint.layout import CheckpointMismatchError
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.zero1 import Zero1Engine

PASSES = {
    1: [[[0, 1, 2, 3, 4, 5, 6]]],
    2: [[[0, 2, 4, 6]], [[1, 3, 5]]],
    4: [[[0, 4]], [[1, 5]], [[2, 6]], [[3]]],
}
EVERYTHING = ["model", "optimizer", "extra"]


def skeleton(model):
    with torch.device("meta"):
        return random_causal_lm(tiny_config(model))


def engine_of(kind, model="qwen2", dtype=torch.float32):
    def build():
        return tiny_model(model).to(dtype)

    config = FSDPOptimizerConfig(lr=0.01, lr_scheduler_type="cosine", total_training_steps=10)
    if kind == "full":
        engine = FSDPEngine(
            build,
            config,
            build_skeleton=lambda: skeleton(model),
            config=FSDPEngineConfig(),
            compute_dtype=dtype,
            device="cpu",
        )
    else:
        engine = {"one": OneDeviceEngine, "zero1": Zero1Engine}[kind](build, config)
    engine.initialize()
    return engine


def manager_of(engine, rank=0, num_ranks=1, save=EVERYTHING, load=EVERYTHING):
    return checkpoint_manager(
        engine.module,
        engine,
        checkpoint_config=CheckpointConfig(save_contents=list(save), load_contents=list(load)),
        rank=rank,
        world_size=num_ranks,
    )


def step(engine, rank=0, num_ranks=1):
    passes = PASSES[num_ranks][rank]
    result = engine.train_batch(batch(), weighted_sum, micro_batching=passes)
    engine.lr_scheduler_step()
    return result.loss, result.grad_norm, result.learning_rate


def weights_of(engine):
    return {
        name: weight.detach().float().numpy().copy()
        for name, weight in engine.get_per_tensor_param()
    }


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(abs(one[name] - other[name]).max() for name in one)


KINDS = ["zero1", "full"]


def test_ranks_continue_bit_for_bit_and_one_rank_takes_over_from_two(tmp_path):
    def work(rank):
        answers = {}
        for kind in KINDS:
            first = engine_of(kind)
            step(first, rank, 2)
            folder = str(tmp_path / kind)
            contents = [*EVERYTHING, "hf_model"]
            manager_of(first, rank, 2, save=contents).save_checkpoint(folder)
            torch.distributed.barrier()
            drawn = random.random(), torch.rand(2).tolist()
            second = engine_of(kind)
            manager_of(second, rank, 2).load_checkpoint(folder)
            assert (random.random(), torch.rand(2).tolist()) == drawn
            assert second.policy_version == 1
            saved = weights_of(first)
            assert step(first, rank, 2) == step(second, rank, 2)
            after = weights_of(first)
            assert largest_difference(after, weights_of(second)) == 0
            answers[kind] = saved, after
        return answers

    on_first, _ = run_on_two_ranks(work, tmp_path)
    for kind in KINDS:
        saved, after = on_first[kind]
        alone = engine_of("one")
        manager = manager_of(alone)
        manager.load_checkpoint(str(tmp_path / kind))
        assert largest_difference(weights_of(alone), saved) == 0
        step(alone)
        assert largest_difference(weights_of(alone), after) < 1e-5
        published = AutoModelForCausalLM.from_pretrained(tmp_path / kind / "huggingface")
        loaded = {name: p.detach().numpy() for name, p in published.named_parameters()}
        assert largest_difference(loaded, saved) == 0
        config = json.loads((tmp_path / kind / "huggingface" / "config.json").read_text())
        assert config["architectures"] == ["Qwen2ForCausalLM"]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_two_ranks_take_over_from_one(tmp_path, dtype):
    alone = engine_of("one", "qwen3_moe", dtype)  # stored in another layout than in memory
    step(alone)
    manager_of(alone).save_checkpoint(str(tmp_path / "saved"))
    saved = weights_of(alone)
    masters = {name: m.detach().clone() for name, m in alone.optimizer.masters.items()}

    def work(rank):
        for kind in KINDS:
            engine = engine_of(kind, "qwen3_moe", dtype)
            manager_of(engine, rank, 2).load_checkpoint(str(tmp_path / "saved"))
            assert largest_difference(weights_of(engine), saved) == 0
            moments = engine.state_dict()["optimizer"]["optimizer"]["state"]
            assert len(moments) == len(masters)
            assert engine.policy_version == 1
            drawn = torch.rand(1).item()
            manager = manager_of(engine, rank, 2, load=["model"])  # from the masters, rounded
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.zero_()
            manager.load_checkpoint(str(tmp_path / "saved"))
            assert largest_difference(weights_of(engine), saved) == 0
        return drawn

    one, other = run_on_two_ranks(work, tmp_path)
    assert one != other, "ranks that did not exist draw numbers of their own"


@pytest.mark.slow
def test_four_ranks_take_over_from_two(tmp_path):
    def save(rank):
        for kind in KINDS:
            engine = engine_of(kind)
            step(engine, rank, 2)
            manager_of(engine, rank, 2).save_checkpoint(str(tmp_path / kind))
        saved = weights_of(engine)
        step(engine, rank, 2)
        return saved, weights_of(engine)

    saved, after = run_on_two_ranks(save, tmp_path)[0]
    (tmp_path / "store").unlink(missing_ok=True)

    def load(rank):
        for wrote in KINDS:
            for kind in KINDS:
                engine = engine_of(kind)
                manager_of(engine, rank, 4).load_checkpoint(str(tmp_path / wrote))
                assert largest_difference(weights_of(engine), saved) < 1e-6
                step(engine, rank, 4)
                assert largest_difference(weights_of(engine), after) < 1e-5

    run_on_ranks(4, load, tmp_path)


def test_another_model_is_refused_with_what_differs(tmp_path):
    engine = engine_of("one", "qwen2")
    manager_of(engine).save_checkpoint(str(tmp_path / "saved"))
    other = engine_of("one", "llama")
    manager = manager_of(other, load=["optimizer"])
    with pytest.raises(CheckpointMismatchError, match=r"lm_head\.weight is missing there"):
        manager.load_checkpoint(str(tmp_path / "saved"))
