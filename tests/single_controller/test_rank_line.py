"""Calls that are doubled, swapped, lost or repeated on their way to a rank: none runs twice."""

import socket
import threading
from collections import Counter

import numpy as np
import pytest

from verl.single_controller.local.payload import Payload, Request
from verl.single_controller.local.rank import Rank
from verl.utils.line import BrokenLineError, Line, call_numbers

FAULTS = ("none", "doubled", "sent again later", "swapped", "lost", "of another line")
CALLS_PER_LINE = 100


class Counting:
    def __init__(self):
        self.runs = Counter()

    def count(self, number):
        self.runs[number] += 1
        return number


def frames_of(rng, fault, first, numbers):
    """Calls as they arrive: (number of the call, what it is asked to count)."""
    calls = [(number, number - first) for number in numbers]
    place = int(rng.integers(1, len(calls) - 1))
    if fault == "doubled":
        calls.insert(place, calls[place])
    elif fault == "sent again later":
        calls.append(calls[place])
    elif fault == "swapped":
        calls[place], calls[place - 1] = calls[place - 1], calls[place]
    elif fault == "lost":
        del calls[place]
    elif fault == "of another line":
        calls.insert(place, (calls[place][0] ^ 1 << 40, -1))
    return calls


def deliver(calls, first):
    """The rank's runs of each call, the replies that came, and whether it broke the line."""
    ours, theirs = socket.socketpair()
    rank, worker = Rank(Line(theirs), first), Counting()
    rank.worker = worker
    line, is_broken = Line(ours), threading.Event()

    def serve():
        try:
            rank.serve()
        except BrokenLineError:
            is_broken.set()
        theirs.close()

    serving = threading.Thread(target=serve)
    serving.start()
    replies = []
    request = Request("count", 1, ()).encoded()
    try:
        for number, counted in calls:
            line.send(number, request)
            line.send(number, Payload.of(counted, "a number").content)
            reply = line.receive()
            if reply is None:
                break
            replies.append((reply.number, Payload(reply.body).unpickle()))
    except OSError:
        pass  # the rank has closed the line
    ours.close()
    serving.join(timeout=30)
    return worker.runs, replies, is_broken.is_set()


def check_lines(num_lines, seed):
    rng = np.random.default_rng(seed)
    for n in range(num_lines):
        first = next(call_numbers())
        numbers = range(first + 1, first + 1 + CALLS_PER_LINE)
        fault = FAULTS[n % len(FAULTS)]
        runs, replies, is_broken = deliver(frames_of(rng, fault, first, numbers), first)
        assert set(runs.values()) <= {1}, f"{fault}: a call ran twice"
        assert -1 not in runs, "a call of another line ran"
        assert all(number - first == value for number, value in replies), "another call's answer"
        assert is_broken == (fault != "none"), fault


def test_no_call_runs_twice_whatever_its_line_delivers():
    check_lines(len(FAULTS), seed=0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_call_of_a_hundred_thousand_runs_twice():
    check_lines(100_000 // CALLS_PER_LINE, seed=1)
