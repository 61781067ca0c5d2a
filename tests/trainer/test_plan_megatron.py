"""A layout that Megatron cannot run is named by the plan, before a worker starts."""

import re

import pytest

from tests.tiny_models import tiny_config
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.schema import nested
from verl.trainer.plan.layout import placement
from verl.trainer.plan.megatron import layout_faults

ACTOR = "actor_rollout_ref.actor"


def planned(tmp_path, **values):
    """Four ranks and a model of 2 layers, 4 heads and 2 KV heads."""
    tiny_config("qwen2").save_pretrained(tmp_path)
    options = {
        f"{ACTOR}.strategy": "megatron",
        "algorithm.adv_estimator": "grpo",
        "trainer.n_gpus_per_node": 4,
        "actor_rollout_ref.model.path": str(tmp_path),
        **{f"{ACTOR}.megatron.{key}": value for key, value in values.items() if "." not in key},
        **{key: value for key, value in values.items() if "." in key},
    }
    by_path = {tuple(key.split(".")): value for key, value in options.items()}
    return load_config(nested(by_path), PPOConfig).config


def test_a_layout_that_divides_the_model_is_in_the_plan(tmp_path):
    config = planned(tmp_path, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert list(layout_faults(config)) == []
    assert placement(config).roles[0].layout == "megatron: tensor 2, pipeline 2, context 1, data 1"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"tensor_model_parallel_size": 4}, r"\(4\) must divide the model's 2 KV heads: 2"),
        ({"pipeline_model_parallel_size": 4}, r"\(4\) must divide the model's 2 layers"),
        ({"expert_model_parallel_size": 2}, "qwen2 has no experts"),
        ({"expert_model_parallel_size": 8}, r"1 \* 8 \* 1 = 8\) must divide the 4 ranks"),
        (
            {"tensor_model_parallel_size": 2, "algorithm.adv_estimator": "gae"},
            "critic.megatron is tensor 1, .* on the same ranks Megatron has one layout",
        ),
    ],
)
def test_one_that_does_not_is_refused(tmp_path, values, text):
    (fault,) = layout_faults(planned(tmp_path, **values))
    assert fault.keys[0].endswith(".megatron")
    assert re.search(text, fault.text), fault.text


def test_other_back_ends_have_no_layout(tmp_path):
    config = planned(tmp_path, **{f"{ACTOR}.strategy": "fsdp"})
    assert list(layout_faults(config)) == []
