"""The built-in engine as one that takes adapters: it merges what an update brings into its base.

W x + (alpha / rank) B A x = (W + (alpha / rank) B A) x
"""

import json
from dataclasses import replace
from pathlib import Path

from verl.workers.rollout.factory import native_process
from verl.workers.rollout.process import native

ROOT = Path(__file__).parents[3]


def spec(order):
    made = native_process(replace(order, adapter=None))
    options = {**made.options, "adapter": json.loads(json.dumps(order.adapter))}
    return replace(
        made,
        build="tests.workers.roles.adapter_engine:build",
        options=options,
        environment={"PYTHONPATH": str(ROOT)},
    )


def build(options):
    options = dict(options)
    adapter = options.pop("adapter")
    return TakesAdapters(native.build(options), adapter)


class TakesAdapters(native.HostedNativeEngine):
    def __init__(self, hosted, adapter):
        super().__init__(hosted.engine)
        self.scale = adapter["lora_alpha"] / adapter["r"]
        module = self.engine.runner.module
        self.base = {name: weight.clone() for name, weight in module.named_parameters()}

    def load_weights(self, weights):
        parts = {}
        for name, tensor in weights:
            layer, _, part = name.partition(".lora_")
            assert part in ("A.default.weight", "B.default.weight"), name
            parts.setdefault(layer, {})[part[0]] = tensor.clone()
        merged = {
            f"{layer}.weight": self.base[f"{layer}.weight"] + self.scale * pair["B"] @ pair["A"]
            for layer, pair in parts.items()
        }
        super().load_weights(iter({**self.base, **merged}.items()))
