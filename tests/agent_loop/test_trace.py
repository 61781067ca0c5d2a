"""A run with `rollout.trace.backend=file` leaves a timeline of turns, grades and weight updates."""

import json
from collections import Counter

from tests.toy import ROLLOUT, make_toy, toy_run
from verl.utils.rollout_trace import RolloutTraceConfig


def test_a_traced_run_leaves_a_span_for_each_turn_grade_and_update(tmp_path):
    toy_run(
        make_toy(tmp_path / "toy"),
        tmp_path / "run",
        *(f"{ROLLOUT}.trace.backend=file", f"{ROLLOUT}.trace.token2text=true"),
        "data.val_files=[]",
    )
    assert RolloutTraceConfig.get_backend() is None, "it ends with the run"
    text = (tmp_path / "run" / "checkpoints" / "trace.json").read_text()
    events = json.loads(text)
    names = Counter(event["name"] for event in events)
    assert names["agent_loop"] == names["SingleTurnAgentLoop.run"] == 2 * 16
    assert names["AsyncLLMServerManager.generate"] == 2 * 16
    assert names["SharedStorage.publish"] == 2
    assert names["grade"] == 2 * 16
    steps = Counter(e["args"]["step"] for e in events if e["name"] == "agent_loop")
    assert steps == {1: 16, 2: 16}
    assert "response_text" in text
