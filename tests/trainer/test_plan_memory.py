"""The memory estimate against what one GPU held, and against the sizes of the code it describes."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu.memory_estimate import CASES, estimate
from benchmarks.gpu.workload import Workload
from verl.models import head
from verl.trainer.plan import memory
from verl.workers.rollout.native.sequence import EngineLimits

RESULTS = Path(__file__).parents[2] / "benchmarks/results/gpu/memory.json"
MEASURED = json.loads(RESULTS.read_text())["runs"][-1]


@pytest.mark.parametrize("case", MEASURED["cases"])
def test_the_estimate_is_within_a_tenth_of_what_an_h200_held(case):
    planned = estimate(CASES[case], Workload(32, 8, 256, 512), "cuda")
    for phase, found in MEASURED["cases"][case].items():
        assert planned[phase] == pytest.approx(found["measured"], rel=0.1), phase


def test_the_plan_knows_the_chunks_of_the_output_layer_and_what_sessions_keep():
    for vocabulary in (96, 32000, 151936, 262144):
        rows = head.row_chunks(1 << 24, vocabulary, num_workspaces=7)[0].stop
        assert memory.chunk_rows(vocabulary) == rows
    assert memory.DEVICE_BYTES // memory.KEPT_BYTES == head.KEPT_SHARE
    assert EngineLimits.max_session_bytes == memory.SESSION_BYTES
