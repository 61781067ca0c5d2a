"""The same on Ray: ranks are actors, killed or stopped from outside Ray."""

import json
import signal

import pytest
from omegaconf import OmegaConf

from tests.chaos.strikes import Strike, Strikes, wait_until_gone
from tests.chaos.table import rows_of
from tests.chaos.test_lost_ranks import LIMITS, PAIR, assert_kept, lasting
from tests.chaos.victims import VictimRunner
from tests.toy import toy_overrides
from tests.trainer.test_ranks import comparable
from verl.trainer.main_ppo import run_ppo
from verl.utils.environment import temp_env_var

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.slow,
    pytest.mark.timeout(500),
]

PHASES = ("generate", "update", "save")


def ray_run(toy, output, changes):
    output.mkdir()
    log = output / "metrics.jsonl"
    with temp_env_var("VERL_FILE_LOGGER_PATH", str(log)):
        config = [*toy_overrides(toy, output), *changes, "trainer.controller=ray"]
        run_ppo(OmegaConf.from_dotlist(config), VictimRunner)
    lines = map(json.loads, log.read_text().splitlines())
    return comparable([{"step": line["step"], **line["data"]} for line in lines])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_actor_may_be_lost_in_any_phase(own_toy, tmp_path, number):
    strikes = [Strike("actor", 1, phase, step, number) for step, phase in enumerate(PHASES, 2)]
    changes = (*PAIR, *lasting(len(strikes)))
    book = Strikes(own_toy)
    book.plan([])
    expected = ray_run(own_toy, tmp_path / "straight", changes)
    book.plan(strikes)
    try:
        found = ray_run(own_toy, tmp_path / "struck", changes)
    finally:
        rows = rows_of(book, "Ray actors", LIMITS)
    assert_kept(rows)
    for row in rows:
        assert "rank 1 (actor " in row.message
        assert "pid " in row.message
    assert found == expected
    assert wait_until_gone(book.pids()) == []
