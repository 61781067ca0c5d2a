"""A service that grades goes away in the middle of a run: nothing is trained on or lost."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from tests.toy import toy_run, weights
from tests.trainer.test_ranks import comparable
from verl.trainer.ppo.trainer import PPOTrainer
from verl.utils import breaker
from verl.utils.breaker import MAX_SHARE, WINDOW, Breaker, Outage

REWARD = """
import json, urllib.request

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    body = json.dumps({{"text": solution_str, "answer": ground_truth}}).encode()
    with urllib.request.urlopen("http://127.0.0.1:{port}", data=body, timeout={seconds}) as answer:
        return float(json.load(answer)["score"])
"""
OUTAGES = ("killed", "status 500", "slow", "garbage", "not a score")


class Service:
    """Grades over HTTP as the toy's reward function does, unless `mode` says otherwise."""

    def __init__(self):
        self.mode = "well"
        self.num_requests = 0
        self.release = threading.Event()
        self._server = None
        self.port = 0
        self.start()

    def start(self):
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                service.respond(self)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        run = self._server.serve_forever
        threading.Thread(target=run, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self):
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._server = None

    def fail(self, mode):
        self.mode = mode
        if mode == "killed":
            self.stop()

    def recover(self):
        self.mode = "well"
        self.release.set()
        if self._server is None:
            self.start()

    def respond(self, handler):
        self.num_requests += 1
        asked = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        if self.mode == "slow":
            self.release.wait(30)
        letters = asked["text"].replace(" ", "")
        score = sum(letter == asked["answer"] for letter in letters) / 8
        bodies = {"garbage": '{"score": ', "not a score": '{"score": "NaN"}'}
        body = bodies.get(self.mode, json.dumps({"score": score})).encode()
        try:
            handler.send_response(500 if self.mode == "status 500" else 200)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)
        except OSError:
            handler.close_connection = True  # the client did not wait


@contextmanager
def service_for(folder, mode):
    service = Service()
    seconds = 0.5 if mode == "slow" else 60  # a busy machine is no outage
    (folder / "asks.py").write_text(REWARD.format(port=service.port, seconds=seconds))
    try:
        yield service
    finally:
        service.release.set()
        service.stop()


def trainer_that_loses(service, mode):
    """In step 2, before anything is graded."""

    class Loses(PPOTrainer):
        before = None

        def rollout(self, step):
            if step.step == 2:
                self.before = weights(self)
                service.fail(mode)
            return super().rollout(step)

    return Loses


def without_faults(metrics):
    counts = ("reward/num_errors", "tripwire/reward_errors")
    return [{k: v for k, v in step.items() if k not in counts} for step in comparable(metrics)]


def asking(folder):
    return f"custom_reward_function.path={folder / 'asks.py'}"


@pytest.mark.parametrize(
    "mode",
    [pytest.param(m, marks=[pytest.mark.slow] * (m not in ("killed", "garbage"))) for m in OUTAGES],
)
def test_a_service_that_fails_pauses_the_run_and_costs_nothing(
    own_toy, tmp_path, monkeypatch, caplog, mode
):
    expected, straight = toy_run(own_toy, tmp_path / "straight")
    with service_for(tmp_path, mode) as service:
        pauses = []

        def back_at_the_second_pause(seconds):
            pauses.append(seconds)
            if len(pauses) == 2:
                service.recover()

        monkeypatch.setattr(breaker, "sleep", back_at_the_second_pause)
        found, trainer = toy_run(
            own_toy,
            tmp_path / "struck",
            asking(tmp_path),
            trainer_class=trainer_that_loses(service, mode),
        )
    assert len(pauses) == 2
    assert "pausing until it is back" in caplog.text
    assert [step["reward/num_groups_set_aside"] for step in found] == [0.0, 0.0]
    assert found[1]["reward/num_errors"] > MAX_SHARE * WINDOW
    assert without_faults(found) == without_faults(expected)
    pairs = zip(weights(trainer).values(), weights(straight).values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("mode", ["killed", "status 500"])
def test_a_service_that_stays_away_ends_the_run_with_its_cause(
    own_toy, tmp_path, monkeypatch, mode
):
    monkeypatch.setattr(breaker, "sleep", lambda seconds: None)
    monkeypatch.setattr(breaker, "MAX_PAUSE_SECONDS", 0.2)
    cause = "Connection refused" if mode == "killed" else "HTTP Error 500"
    with service_for(tmp_path, mode) as service:
        loses = trainer_that_loses(service, mode)
        with pytest.raises(Outage, match=rf"failed in .* {cause}.*did not come back") as outage:
            toy_run(own_toy, tmp_path, asking(tmp_path), trainer_class=loses)
    assert outage.value.exit_code == 70


def test_the_breaker_opens_above_its_share_of_the_last_calls():
    watched = Breaker("the service")
    num_allowed = int(MAX_SHARE * WINDOW)
    for _ in range(num_allowed):
        watched.note("away")
    assert not watched.is_open
    watched.note("away")
    assert watched.is_open
    for _ in range(WINDOW):
        watched.note(None)
    assert not watched.is_open, "it is about the last calls"


def test_calls_that_fail_beside_others_that_do_not_are_no_outage(monkeypatch):
    monkeypatch.setattr(breaker, "sleep", lambda seconds: pytest.fail("paused"))
    watched = Breaker("the service")
    for _ in range(WINDOW):
        watched.note("this response is too long")
    assert watched.pause(lambda: 0.0) is False
