"""`rollout.name=rounded`: the engine of `tests.workers.rollout.mismatched`, for whole runs.

`rollout.custom.bits` says how many bits its weights have.
"""

from dataclasses import replace

from tests.workers.rollout.mismatched import BUILD, ROOT
from verl.workers.rollout.factory import ProcessEngineSpec, native_process, register_engine
from verl.workers.rollout.process.client import EngineSpec


@register_engine("rounded")
def rounded(order: ProcessEngineSpec) -> EngineSpec:
    spec = native_process(order)
    return replace(
        spec,
        build=BUILD,
        options={**spec.options, **(order.rollout.custom or {})},
        environment={**spec.environment, "PYTHONPATH": str(ROOT)},
    )
