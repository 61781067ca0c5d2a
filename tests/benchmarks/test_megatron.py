"""The comparison with megatron-core runs as a whole, on a CPU with a tiny model."""

import json

import pytest

from benchmarks.gpu import megatron
from tests.benchmarks.test_parts import TINY
from tests.utils.two_ranks import run_on_ranks


@pytest.mark.slow
def test_megatron_computes_what_our_engine_computes(tmp_path):
    out = tmp_path / "result.json"
    run_on_ranks(1, lambda rank: megatron.main(["--out", str(out), *TINY, "--rounds=1"]), tmp_path)
    found = json.loads(out.read_text())["engines"]
    assert set(found) == set(megatron.ENGINES)
    for engine in found.values():
        assert engine["mean_log_prob"] == pytest.approx(found["own"]["mean_log_prob"], rel=1e-5)
        assert engine["median_seconds"]["train"] > 0
