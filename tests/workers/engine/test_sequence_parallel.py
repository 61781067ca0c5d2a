"""An engine whose ranks divide the tokens of a pass gives the columns and the gradient of one."""

import pytest
import torch
import torch.distributed as dist

from tests.tiny_models import plain_twin, tiny_model
from tests.utils.two_ranks import run_on_ranks, run_on_two_ranks
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.experts import set_aux_loss
from verl.models.loading import load_value_model, score_head
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.outputs import Outputs
from verl.workers.engine.routes import AUX_LOSS

PASSES = [[0], [1, 2, 3], [], [4, 5, 6]]  # row 0 has no response; a pass may have no rows
CASES = {
    "llama": {},
    "qwen2": {},
    "gemma2": {},
    "gpt_oss": {},
    "qwen3_moe": {},
    "qwen3_moe with auxiliary loss": {},
    "llama with checkpointing": {"gradient_checkpointing": True},
    "llama with shared prompts": {"prefix_sharing": True},
    "values": {"is_value_model": True},
    "values with checkpointing": {"is_value_model": True, "gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def critic_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    plain_twin(tiny_model("llama")).save_pretrained(path)
    return str(path)


def build(name, critic_path, group):
    def model():
        if not name.startswith("values"):
            coef = {"router_aux_loss_coef": 1.0} if name.endswith("auxiliary loss") else {}
            return set_aux_loss(tiny_model(name.split()[0], **coef), coef)
        critic = load_value_model(critic_path)
        with torch.no_grad():  # it starts at zero, through which no gradient goes
            score_head(critic).weight.copy_(torch.linspace(-1, 1, 32))
        return critic

    config = FSDPOptimizerConfig(lr=1.0, optimizer="SGD", weight_decay=0.0)
    engine = OneDeviceEngine(model, config, max_grad_norm=1e9, **CASES[name])
    engine.sequence_group = group
    engine.initialize()
    return engine


def rows():
    """Those of the other engines' tests, but rows 1 to 3 have the same prompt of six tokens."""
    data = batch()
    ids, mask = data["input_ids"], data["attention_mask"]
    ids[1:4, :6], mask[1:4, :6] = torch.arange(30, 36), 1
    data["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    return data


def loss(columns, rows):
    if "values" in columns:
        return (columns["values"] * rows["weight"]).sum() / 10, {}
    value, metrics = weighted_sum(columns, rows)
    if AUX_LOSS in columns:
        value = value + columns[AUX_LOSS].sum()
    return value, metrics


def columns_loss_and_step(name, critic_path, group=None):
    """What the engine says of the rows, and how far one step of size 1 moves the weights: minus
    the gradient, on several ranks the part of it that this rank computed."""
    engine = build(name, critic_path, group)
    asks = (
        {}
        if name.startswith("values")
        else {"outputs": Outputs(sum_pi_squared=True), "temperature": 0.8}
    )
    columns = engine.infer_batch(rows(), micro_batching=PASSES, **asks)
    before = {key: p.detach().clone() for key, p in engine.module.named_parameters()}
    result = engine.train_batch(rows(), loss, micro_batching=PASSES)
    after = dict(engine.module.named_parameters())
    moved = {key: (after[key].detach() - start).numpy() for key, start in before.items()}
    return {key: column.numpy() for key, column in columns.items()}, float(result.loss), moved


def assert_as_alone(name, critic_path, found):
    columns, alone, moved = columns_loss_and_step(name, critic_path)
    for found_columns, found_loss, _ in found:
        assert found_columns.keys() == columns.keys()
        assert found_loss == pytest.approx(alone, rel=1e-5, abs=1e-5)
        for key, column in columns.items():
            close(found_columns[key], column, key)
    for key, step in moved.items():
        close(sum(torch.tensor(part[key]) for _, _, part in found), step, key)


def close(found, expected, name):
    expected = torch.as_tensor(expected)
    atol = 1e-5 * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-5, atol=atol, msg=name)


@pytest.fixture(scope="module")
def found_by_two(critic_path, tmp_path_factory):
    def work(rank):
        del rank
        return {name: columns_loss_and_step(name, critic_path, dist.group.WORLD) for name in CASES}

    return run_on_two_ranks(work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_columns_and_gradient_of_two_ranks_are_those_of_one(name, critic_path, found_by_two):
    assert_as_alone(name, critic_path, [found[name] for found in found_by_two])


@pytest.mark.slow
def test_columns_and_gradient_of_four_ranks_are_those_of_one(critic_path, tmp_path):
    def work(rank):
        del rank
        return {name: columns_loss_and_step(name, critic_path, dist.group.WORLD) for name in CASES}

    found_by_four = run_on_ranks(4, work, tmp_path)
    for name in CASES:
        assert_as_alone(name, critic_path, [found[name] for found in found_by_four])


def test_a_model_whose_heads_do_not_divide_is_refused_when_the_engine_starts(tmp_path):
    def work(rank):
        del rank
        engine = OneDeviceEngine(
            lambda: tiny_model(
                "llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24
            )
        )
        engine.sequence_group = dist.group.WORLD
        with pytest.raises(ValueError, match="ulysses_sequence_parallel_size"):
            engine.initialize()

    run_on_two_ranks(work, tmp_path)
