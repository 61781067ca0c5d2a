"""Megatron engines on tiny models, and what one rank alone makes of the same rows."""

import torch
from transformers import AutoModelForTokenClassification

from tests.tiny_models import tiny_config, tiny_model
from tests.workers.engine.test_one_device import batch, weighted_sum
from verl.config.engine import McoreEngineConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.attention import ATTENTION
from verl.models.experts import set_aux_loss
from verl.models.loading import prepare_layers
from verl.workers.engine import megatron
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.routes import AUX_LOSS

SGD = FSDPOptimizerConfig(lr=1.0, optimizer="SGD", weight_decay=0.0)
ADAM = FSDPOptimizerConfig(
    lr=0.01,
    weight_decay=0.1,
    override_optimizer_config={"eps": 1e-3},  # a gradient that is rounding alone moves nothing
)
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    }
}
PASSES = [[0], [1, 2, 3], [], [4, 5, 6]]  # row 0 has no response; a pass may have no rows


def megatron_engine(
    model_type,
    optimizer: FSDPOptimizerConfig | None = SGD,
    *,
    max_grad_norm=1e9,
    changes=None,
    options=None,
    model=None,
    section=None,
    **sizes,
):
    def build():
        return model_with(model_type, changes) if model is None else model()

    sizes = {
        key
        if key.endswith(("_size", "_parallel", "_optimizer"))
        else f"{key}_model_parallel_size": v
        for key, v in sizes.items()
    }
    engine = megatron.MegatronEngine(
        build,
        optimizer,
        build_skeleton=lambda: build().to("meta"),
        config=McoreEngineConfig(**{"override_transformer_config": {}, **sizes, **(section or {})}),
        compute_dtype=torch.float32,
        device="cpu",
        max_grad_norm=max_grad_norm,
        **(options or {}),
    )
    engine.initialize()
    return engine


def engine_alone(model_type, optimizer=SGD, *, max_grad_norm=1e9, changes=None):
    engine = OneDeviceEngine(
        lambda: model_with(model_type, changes), optimizer, max_grad_norm=max_grad_norm
    )
    engine.initialize()
    return engine


def model_with(model_type, changes):
    """With an auxiliary loss if `changes` has its coefficient."""
    return set_aux_loss(tiny_model(model_type, **(changes or {})), changes)


def loss_of(engine):
    def balanced(columns, data):
        loss, _ = weighted_sum(columns, data)
        aux_loss = columns[AUX_LOSS].sum() / 7
        return loss + engine.routes.aux_loss_coef * aux_loss, {"aux_loss": aux_loss.item()}

    has_aux_loss = engine.routes is not None and engine.routes.aux_loss_coef
    return balanced if has_aux_loss else weighted_sum


def rows():
    """Those of the other engines' tests; one prompt ends in the padding token, which counts, and a
    response begins with it: the first token of a vocabulary, and of a rank's part of it."""
    data = batch()
    data["input_ids"][2, 5] = data["input_ids"][1, 6] = data["responses"][1, 0] = 0
    assert data["response_mask"][1, 0] == 1
    return data


def outcome(engine, passes=PASSES, *, steps=1, temperature=0.8):
    """Columns, then losses, norms and weights of some steps, as arrays."""
    columns = engine.infer_batch(rows(), micro_batching=passes, temperature=temperature)
    loss = loss_of(engine)
    results = [
        engine.train_batch(rows(), loss, micro_batching=passes, temperature=temperature)
        for _ in range(steps)
    ]
    # Data ranks have shares of these too.
    aux_losses = [sum(m.get("aux_loss", 0.0) for m in result.metrics) for result in results]
    columns["aux losses"] = torch.tensor(aux_losses)
    if engine.routes is not None:
        columns["load"] = engine.routes.load.counts
    return {
        "columns": {name: column.numpy() for name, column in columns.items()},
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "reports": [len(result.metrics) for result in results],
        "weights": {n: w.detach().clone().numpy() for n, w in engine.get_per_tensor_param()},
    }


def assert_same(found, expected, tolerance=1e-5):
    for name, column in expected["columns"].items():
        close(found["columns"][name], column, name, tolerance)
    close(found["losses"], expected["losses"], "losses", tolerance)
    close(found["norms"], expected["norms"], "norms", tolerance)
    assert found["reports"] == expected["reports"]
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        close(found["weights"][name], weight, name, tolerance)


def close(found, expected, name, tolerance):
    expected = torch.as_tensor(expected)
    atol = tolerance * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(
        torch.as_tensor(found), expected, rtol=tolerance, atol=atol, msg=lambda m: f"{name}: {m}"
    )


def passes_of(data_rank, num_data):
    """This rank's micro-batches; together all rows, and equally many on each rank."""
    return [list(rows) for rows in PASSES[data_rank::num_data]]


def on_layout(model_type, **options):
    """What this rank finds; groups are taken down for the next layout."""
    from megatron.core import parallel_state

    try:
        engine = megatron_engine(model_type, **options)
        rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        steps = 3 if options.get("optimizer") is ADAM else 1
        return rank, outcome(engine, passes_of(rank, size), steps=steps)
    finally:
        parallel_state.destroy_model_parallel()


def assert_as_alone(model_type, found, *, optimizer=SGD, max_grad_norm=1e9, changes=None, **sizes):
    """`found` are what `on_layout` gave on each rank."""
    steps = 3 if optimizer is ADAM else 1
    alone = engine_alone(model_type, optimizer, max_grad_norm=max_grad_norm, changes=changes)
    expected = outcome(alone, steps=steps)
    num_data = 1 + max(rank for rank, _ in found)
    for rank, own in found:
        shards = {rank: own, **dict(found)} | {rank: own}
        columns = {
            name: sum(shard["columns"][name] for shard in shards.values())
            for name in expected["columns"]
        }
        reports = [len(PASSES) // num_data] * steps
        assert own["reports"] == reports
        assert_same({**own, "columns": columns, "reports": expected["reports"]}, expected)


def after_two_layouts(first, second, model_type="qwen2"):
    """A step on one layout and, after a checkpoint, two on another; then weights and norms."""
    from megatron.core import parallel_state

    options = {"optimizer": ADAM, "max_grad_norm": 0.5}
    try:
        engine = megatron_engine(model_type, **options, **first)
        rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        engine.train_batch(rows(), weighted_sum, micro_batching=passes_of(rank, size))
        weights, state = engine.weight_parts(), engine.state_dict()
        parallel_state.destroy_model_parallel()
        engine = megatron_engine(model_type, **options, **second)
        with torch.no_grad():
            for chunk in engine.chunks:
                for parameter in chunk.parameters():
                    parameter.zero_()
        engine.load_weight_parts(weights)
        engine.load_state_dict(state)
        rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        return rank, outcome(engine, passes_of(rank, size), steps=2)
    finally:
        parallel_state.destroy_model_parallel()


def assert_as_without_interruption(found, model_type="qwen2"):
    alone = engine_alone(model_type, ADAM, max_grad_norm=0.5)
    alone.train_batch(rows(), weighted_sum, micro_batching=PASSES)
    expected = outcome(alone, steps=2)
    for _, own in found:
        assert_same(
            {**own, "columns": expected["columns"], "reports": expected["reports"]}, expected
        )


def value_model():
    config = tiny_config("llama", num_labels=1)
    config._attn_implementation = ATTENTION
    torch.manual_seed(3)
    model = AutoModelForTokenClassification.from_config(config, attn_implementation=ATTENTION)
    return prepare_layers(model)


def value_loss(columns, rows):
    return (columns["values"] * rows["weight"]).sum() / 10, {}
