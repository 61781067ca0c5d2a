"""Megatron on one rank computes what the engine on one device does."""

import pytest

from tests.workers.engine.megatron.cases import (
    ADAM,
    SGD,
    assert_same,
    engine_alone,
    megatron_engine,
    outcome,
)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_columns_gradient_and_steps_are_those_of_one_device(model_type, one_rank):
    for optimizer, steps, norm in ((SGD, 1, 1e9), (ADAM, 3, 0.5)):
        found = outcome(megatron_engine(model_type, optimizer, max_grad_norm=norm), steps=steps)
        expected = outcome(engine_alone(model_type, optimizer, max_grad_norm=norm), steps=steps)
        assert_same(found, expected)
