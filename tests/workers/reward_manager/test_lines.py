"""Whatever happens on the line to a process that grades, a response gets its own grade or none."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pace import wait_until
from tests.tiny_tokenizer import tiny_tokenizer
from tests.workers.reward_manager.batches import batch
from tests.workers.reward_manager.test_worker_pool import is_running
from verl.utils import line
from verl.utils.forked_workers import WorkerProcess
from verl.utils.line import HEADER, Line, header_of
from verl.utils.py_functional import timeout_limit
from verl.workers.reward_manager import get_reward_manager_cls
from verl.workers.reward_manager.adapters import grades_of
from verl.workers.reward_manager.grader import InfraError, Score
from verl.workers.reward_manager.prime import parallel_compute_score_async
from verl.workers.reward_manager.workers import RayWorkerPool, WorkerPool, packed

EARNED = {"5": 0.7, "6": 0.3, "7": 0.1, "8": 0.2}

# ---- forks ---------------------------------------------------------------------------------------


def by_exit():
    sys.exit()


def by_return():
    return 0.8


def by_error():
    raise ValueError("in a fork")


def forking(leave):
    """Grades in the parent; the fork comes back through the frames below it, first."""

    def function(solution_str, **kwargs):
        child = os.fork()
        if child == 0:
            return leave()
        os.waitpid(child, 0)
        return EARNED[solution_str]

    return function


@pytest.mark.parametrize(
    ("name", "options", "leave"),
    [
        ("naive", {}, by_exit),
        ("naive", {}, by_return),
        ("naive", {"isolate": True}, by_exit),
        ("dapo", {"isolate": True}, by_exit),
        ("prime", {"num_workers": 1}, by_exit),
        ("prime", {"num_workers": 1}, by_return),
        ("prime", {"num_workers": 1}, by_error),
        ("remote", {"num_workers": 1}, by_exit),
        ("rate_limited", {}, by_exit),
    ],
)
def test_a_fork_does_not_answer(name, options, leave):
    made = get_reward_manager_cls(name)(tiny_tokenizer(), 0, forking(leave), **options)
    grades = grades_of(batch(*EARNED), made)
    assert [grade.value for grade in grades] == [0.7, 0.3, 0.1, 0.2]


def test_a_fork_does_not_answer_a_batch_of_positional_calls():
    function = forking(by_exit)
    call = lambda task, completion, reference, info: function(completion)  # noqa: E731
    scores = parallel_compute_score_async(call, list(EARNED), [""] * 4, [""] * 4, num_processes=1)
    assert asyncio.run(scores) == [0.7, 0.3, 0.1, 0.2]


@pytest.mark.parametrize("leave", [by_exit, by_return, by_error])
def test_a_fork_does_not_answer_a_call_with_a_time_limit(leave):
    limited = timeout_limit(60)(forking(leave))
    assert [limited(text) for text in EARNED] == [0.7, 0.3, 0.1, 0.2]


@pytest.mark.ray
@pytest.mark.slow
def test_a_fork_does_not_answer_for_a_ray_actor(ray_cluster):
    pool = RayWorkerPool(forking(by_return), timeout_seconds=60.0)
    try:
        assert [pool.call({"solution_str": text}).value for text in EARNED] == [0.7, 0.3, 0.1, 0.2]
    finally:
        pool.close()


# ---- what a worker says --------------------------------------------------------------------------


@pytest.fixture
def pool_of():
    pools = []

    def make(function, timeout_seconds=60.0):
        pools.append(WorkerPool(function, timeout_seconds=timeout_seconds))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


class CodeForTheTrainer:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return subprocess.call, (["touch", self.path],)


def test_an_object_in_a_report_is_a_fault_and_never_code_in_the_trainer(pool_of, tmp_path):
    trap = str(tmp_path / "sprung")
    grade = pool_of(lambda: {"score": 1.0, "trap": CodeForTheTrainer(trap)}).call({})
    assert "CodeForTheTrainer is not plain data" in grade.reason
    assert not os.path.exists(trap)


class Counted(dict):
    pass


def test_subclasses_of_plain_types_are_reported_as_those(pool_of):
    report = {"score": True, "counts": Counted(a=(1, 2.5)), "text": "\ud800", "none": None}
    extras = pool_of(lambda: report).call({}).extras
    assert extras == {"counts": {"a": (1, 2.5)}, "text": "\ud800", "none": None}
    assert type(extras["counts"]) is dict


def own_line() -> socket.socket:
    """Found by a function that wants to speak for itself; those of the trainer are closed."""
    (end,) = [end for end in line._ends if end.fileno() >= 0]
    return end


FORGED = packed(Score(0.9))


@pytest.mark.parametrize(
    "words",
    [
        b"hello",
        header_of(1, FORGED) + FORGED,  # a grade, for another call
        header_of(1, FORGED)[:-1] + b"\0" + FORGED,
        HEADER.pack(b"verl", 0, 1, 1 << 50, 0),
    ],
    ids=["text", "number", "checksum", "length"],
)
def test_words_of_its_own_cost_a_worker_its_life_and_no_grade_is_taken_from_them(pool_of, words):
    def function(number, is_first):
        if is_first and number == 1:
            own_line().sendall(words)
        return number

    pool = pool_of(function)
    fault = pool.call({"number": 1, "is_first": True})
    assert isinstance(fault, InfraError)
    assert fault.is_final
    assert "was killed" in fault.reason
    assert pool.call({"number": 2, "is_first": False}).value == 2


def test_what_is_said_after_a_reply_is_not_the_next_one(pool_of, tmp_path):
    """A thread of the function says something once its call is over."""

    def function(number):
        end = own_line()

        def later():
            wait_until((tmp_path / "go").exists)
            end.sendall(header_of(1, FORGED) + FORGED)
            (tmp_path / "said").touch()

        if number == 1:
            threading.Thread(target=later).start()
        return {"score": number, "pid": os.getpid()}

    pool = pool_of(function)
    first = pool.call({"number": 1})
    (tmp_path / "go").touch()
    wait_until((tmp_path / "said").exists)
    second = pool.call({"number": 2})
    assert (first.value, second.value) == (1, 2)
    assert first.extras["pid"] != second.extras["pid"]


# ---- the line itself -----------------------------------------------------------------------------


class Proxy(threading.Thread):
    """Stands between the trainer and a worker, and does to each frame what the script says."""

    def __init__(self, near: socket.socket, far: socket.socket, script) -> None:
        super().__init__(daemon=True)
        self.ends = near, far
        self.script = script
        self.seen = [b""]

    def run(self):
        pumps = [
            threading.Thread(target=self.pump, args=ends, daemon=True)
            for ends in (self.ends, self.ends[::-1])
        ]
        for pump in pumps:
            pump.start()
        for pump in pumps:
            pump.join(timeout=600)
        for end in self.ends:
            end.close()

    def pump(self, source, target):
        try:
            while (frame := Line(source).receive()) is not None:
                octets = header_of(frame.number, frame.body) + bytes(frame.body)
                for part in self.changed(octets):
                    target.sendall(part)
                self.seen.append(octets)
        except OSError:
            pass
        for end in self.ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def changed(self, octets):
        what, number = next(self.script, ("pass", 0))
        place = number % len(octets)
        other = int.from_bytes(octets[5:13], "big") + number % 5 - 2
        match what:
            case "drop":
                return []
            case "double":
                return [octets, octets]
            case "replay before":
                return [self.seen[number % len(self.seen)], octets]
            case "replay after":
                return [octets, self.seen[number % len(self.seen)]]
            case "replay instead":
                return [self.seen[number % len(self.seen)]]
            case "cut":
                return [octets[:place] + octets[place + 1 + number % 7 :]]
            case "end":
                return [octets[:place]]
            case "flip":
                return [octets[:place], bytes([octets[place] ^ 0x10]), octets[place + 1 :]]
            case "inject":
                return [octets[:place], octets[: number % 40], octets[place:]]
            case "forge":
                return [header_of(other, FORGED), FORGED] if other != number_of(octets) else []
            case _:
                return [octets]


def number_of(octets: bytes) -> int:
    return int.from_bytes(octets[5:13], "big")


DEEDS = ["pass", "drop", "double", "replay before", "replay after", "replay instead"]
DEEDS += ["cut", "end", "flip", "inject", "forge"]


SCRIPTS = st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(0, 10**6)), max_size=12)


@settings(max_examples=5, deadline=None)
@given(SCRIPTS)
def test_no_damage_to_the_line_gives_a_wrong_grade(script):
    check_grades(script)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=100, deadline=None)
@given(SCRIPTS)
def test_no_damage_to_the_line_gives_a_wrong_grade_in_many_runs(script):
    check_grades(script)


def check_grades(deeds):
    pool, script = WorkerPool(lambda number: number / 8, timeout_seconds=0.2), iter(deeds)
    start_worker = pool._processes._new_worker

    def with_proxy():
        worker = start_worker()
        near, far = socket.socketpair()
        Proxy(far, worker.line._connection, script).start()
        return WorkerProcess(worker.pid, Line(near))

    pool._processes._new_worker = with_proxy
    try:
        for number in range(1, 6):
            grade = pool.call({"number": number})
            assert isinstance(grade, InfraError) or grade.value == number / 8
        list(script)  # from here on nothing is changed
        pool.timeout_seconds = 60.0
        assert pool.call({"number": 9}).value == 9 / 8
    finally:
        pool.close()


# ---- what a function leaves behind ---------------------------------------------------------------


def daemon(path) -> int:
    """Forked twice, with a session of its own and nothing of ours open; its pid is in the file."""
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 256)
            descriptor = os.open(f"{path}.new", os.O_CREAT | os.O_WRONLY)
            os.write(descriptor, str(os.getpid()).encode())
            os.rename(f"{path}.new", path)
            while True:
                time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)
    wait_until(path.exists)
    return int(path.read_text())


def test_a_daemon_ends_with_its_worker_at_the_deadline_and_no_other_does(pool_of, tmp_path):
    def function(number):
        pid = daemon(tmp_path / str(number))
        if number == 1:
            time.sleep(600)
        return {"score": 1.0, "pid": pid}

    pool = pool_of(function)
    kept = pool.call({"number": 2}).extras["pid"]
    taken = pool._processes.take()  # so that the next call has another worker
    pool.timeout_seconds = 2.0
    while not (tmp_path / "1").exists():  # a busy machine may need a second try
        assert pool.call({"number": 1}).is_timeout
    lost = int((tmp_path / "1").read_text())
    wait_until(lambda: not is_running(lost))
    assert is_running(kept)
    pool._processes.put_back(taken)
    pool.close()
    wait_until(lambda: not is_running(kept))


def test_a_daemon_ends_with_a_worker_that_dies_and_does_not_hold_its_line_open(pool_of, tmp_path):
    def function():
        daemon(tmp_path / str(os.getpid()))
        os._exit(9)

    assert "4 processes died" in pool_of(function, timeout_seconds=600.0).call({}).reason
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 4
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize("victim", ["trainer", "fork server"])
def test_a_daemon_ends_with_the_run(tmp_path, victim):
    reader, writer = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        try:
            pool = WorkerPool(
                lambda: {"score": 1.0, "pid": daemon(tmp_path / "pid")}, timeout_seconds=60.0
            )
            pid = pool.call({}).extras["pid"]
            os.write(writer, f"{pool._processes._server_pid} {pid}".encode())
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(writer)
    server, pid = map(int, os.read(reader, 100).split())
    os.close(reader)
    assert is_running(pid)
    os.kill(trainer if victim == "trainer" else server, 9)
    wait_until(lambda: not is_running(pid))
    if victim != "trainer":
        os.kill(trainer, 9)
    os.waitpid(trainer, 0)
