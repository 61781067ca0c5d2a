"""256 clients at once: everybody gets his own answer, nobody's place is lost."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from tests.pace import PATIENCE, pace, wait_until
from tests.server.conftest import OPTIONS
from tests.server.engines import TOKEN, byte_tokenizer
from tests.server.load import length_of, prompt_of
from verl.server import RunningServer, serve
from verl.workers.rollout.base import GenerationRequest, SamplingParams

NUM_CLIENTS = 256
HEALTH_SECONDS = 0.5
LIMIT_SECONDS = 100 * PATIENCE
ROOT = Path(__file__).parents[2]


def test_many_clients_get_their_own_answers_and_leave_nothing_behind(engine):
    requests = [
        GenerationRequest(
            request_id=f"direct {n}",
            prompt_ids=tuple(prompt_of(n)),
            params=SamplingParams(max_tokens=length_of(n), seed=n),
        )
        for n in range(NUM_CLIENTS)
    ]
    direct = engine.generate_batch(requests)
    # On a busy machine a client may be slow without wanting to.
    patient = {"receipt_seconds": LIMIT_SECONDS, "keep_alive_seconds": LIMIT_SECONDS}
    options = dataclasses.replace(OPTIONS, max_running=64, max_waiting=100, **patient)
    with serve([engine], byte_tokenizer(), options) as server:
        found = run_clients(server)
        answers = {int(number): ids for number, ids in found["answers"].items()}
        staying = {n for n in range(NUM_CLIENTS) if n % 10 not in (3, 7)}
        assert answers.keys() == staying
        assert {n: direct[n][0].token_ids for n in staying} == answers
        assert set(found["statuses"]) <= {"200", "429"}
        assert found["statuses"]["429"] > 0
        assert found["health_asked"] > 5
        assert found["health_p50"] < HEALTH_SECONDS * pace(), found["health_p99"]
        assert_nothing_is_left(server)
    engine.sleep()  # which it refuses while anything runs
    engine.wake_up()


def run_clients(server: RunningServer) -> dict:
    command = [sys.executable, "-m", "tests.server.load", server.url, TOKEN, str(NUM_CLIENTS)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout.splitlines()[-1])
    print({name: value for name, value in found.items() if name != "answers"})
    return found


def assert_nothing_is_left(server: RunningServer) -> None:
    service = server.service
    wait_until(lambda: not service.admission.num_running and not service.fleet.outstanding[0])
    assert service.admission.num_waiting == 0
