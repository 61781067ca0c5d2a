"""`VERL_LOGGING_LEVEL` shows what happens; by default only what needs attention is said."""

import logging
import os
import subprocess
import sys

import pytest

from tests.toy import toy_run

EVENTS = [
    "worker group actor_rollout: 1 ranks started",
    "training engine one_device",
    "rollout engine native",
    "cache: keys and values of",
    "weights published",
    "phase gen",
    "phase update_actor",
    "checkpoint of step 2: written below",
    "checkpoint of step 2: committed",
]


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_run_names_its_events_at_info_and_is_quiet_above(level, toy, tmp_path, caplog):
    caplog.set_level(level, logger="verl")
    toy_run(toy, tmp_path, "trainer.save_freq=2")
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    for event in EVENTS if level == logging.INFO else ():
        assert any(event in line for line in said), (event, said)
    assert level == logging.INFO or said == []
    assert len(said) < 100


def test_requests_and_batches_are_named_at_debug(toy, tmp_path, caplog):
    caplog.set_level(logging.DEBUG, logger="verl")
    toy_run(toy, tmp_path, "trainer.total_training_steps=1")
    assert "4 samples: to engine 0" in caplog.text
    assert "batch of rows [" in caplog.text


@pytest.mark.parametrize(("level", "is_shown"), [("INFO", True), ("", False)])
def test_a_program_without_logging_of_its_own_sees_the_lines(level, is_shown):
    program = "import verl, logging; logging.getLogger('verl.trainer').info('phase %s', 'gen')"
    variables = {**os.environ, "VERL_LOGGING_LEVEL": level or "WARN"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=100
    )
    assert ("[verl.trainer][INFO] phase gen" in result.stderr) is is_shown
