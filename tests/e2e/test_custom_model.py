"""A model class of the user's own, registered with transformers by `external_lib`, is trained."""

import json
import sys

from tests.toy import make_toy, toy_run

MODULE = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP


class MineConfig(LlamaConfig):
    model_type = "mine"


class HalvedMLP(LlamaMLP):
    def forward(self, x):
        return super().forward(x) / 2


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.__class__ = HalvedMLP


AutoConfig.register("mine", MineConfig)
AutoModelForCausalLM.register(MineConfig, MineForCausalLM)
"""


def test_a_model_of_external_lib_generates_and_learns(tmp_path, monkeypatch):
    toy = make_toy(tmp_path / "toy")
    config = toy / "model" / "config.json"
    described = json.loads(config.read_text()) | {
        "model_type": "mine",
        "architectures": ["MineForCausalLM"],
    }
    config.write_text(json.dumps(described))
    (tmp_path / "my_own_model.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    steps, _ = toy_run(
        toy,
        tmp_path,
        "actor_rollout_ref.model.external_lib=my_own_model",
        "trainer.total_training_steps=6",
    )
    assert "my_own_model" in sys.modules
    assert max(step["training/rollout_probs_diff_max"] for step in steps) < 1e-5
    scores = [step["critic/score/mean"] for step in steps]
    assert max(scores[-2:]) > scores[0]
