"""Messages arrive whole or not at all; who does not know the token or the protocol is refused."""

import os
import socket
import threading

import pytest

from verl.utils.line import HEADER, header_of
from verl.workers.rollout.process.host import Heartbeat, Host
from verl.workers.rollout.process.wire import (
    MAX_MESSAGE_BYTES,
    Wire,
    WireClosedError,
    WireError,
    encode,
)


def frame(number, content):
    content = content if isinstance(content, bytes) else encode(content)
    return header_of(number, content) + content


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    yield left, Wire(right)
    left.close()


def test_messages_arrive_in_order_however_they_are_cut(ends):
    raw, wire = ends
    numbers = [0.1, -4.7927937507629395, 1e-45, -0.0, 3.4028234663852886e38]
    content = frame(0, {"numbers": numbers}) + frame(1, {"text": "ä" * 5})
    messages = []
    for place in range(len(content)):
        raw.sendall(content[place : place + 1])
        messages += wire.arrived(5.0 if place == len(content) - 1 else 0.0)
    assert messages == [{"numbers": numbers}, {"text": "ä" * 5}]
    assert str(messages[0]["numbers"][3]) == "-0.0"
    wire.close()


def test_many_messages_are_read_at_once(ends):
    raw, wire = ends
    thread = threading.Thread(
        target=lambda: [raw.sendall(frame(n, {"n": n, "pad": "x" * 5000})) for n in range(400)]
    )
    thread.start()
    got = []
    while len(got) < 400:
        got += wire.arrived(60.0)
    thread.join(timeout=60)
    assert [message["n"] for message in got] == list(range(400))
    wire.close()


def test_a_descriptor_comes_with_its_own_message(ends):
    raw, wire = ends
    sender = Wire(raw)
    for number in range(3):
        read, write = os.pipe()
        os.write(write, b"%d" % number)
        os.close(write)
        sender.send(encode({"number": number, "descriptor": True}), read)
        os.close(read)
        sender.send(encode({"number": -1}))
    got = [message for message in wire.arrived(60.0) if "descriptor" in message]
    assert [os.read(message["descriptor"], 9) for message in got] == [b"0", b"1", b"2"]
    for message in got:
        os.close(message["descriptor"])
    wire.close()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\xff" * 100, "a frame begins with"),
        (HEADER.pack(b"verl", 0, 0, 2**32 - 1, 0), "4294967295 bytes was announced"),
        (HEADER.pack(b"verl", 0, 0, MAX_MESSAGE_BYTES + 1, 0), "the limit is"),
        (frame(0, b"hello"), "is not JSON"),
        (frame(0, b"\xff\xfe"), "is not JSON"),
        (frame(0, b"[1]"), "a message is a list"),
        (frame(0, {"descriptor": True}), "did not come with it"),
        (frame(1, {}), "message 1 came instead of 0"),
        (frame(0, {}) * 2, "message 0 came instead of 1"),
        (frame(0, {}) + frame(2, {}), "message 2 came instead of 1"),
        (frame(0, b"{}")[:-1] + b"]", "are damaged"),
    ],
)
def test_a_peer_that_does_not_speak_the_protocol_is_refused(ends, content, complaint):
    raw, wire = ends
    raw.sendall(content)
    with pytest.raises(WireError, match=complaint):
        wire.arrived(60.0)
    wire.close()


def test_nesting_without_end_is_refused(ends):
    raw, wire = ends
    content = b"[" * 200_000
    thread = threading.Thread(target=raw.sendall, args=[frame(0, content)])
    thread.start()
    with pytest.raises(WireError, match="is not JSON"):
        assert [wire.arrived(60.0) for _ in range(1000)] == "never reached"
    thread.join(timeout=60)
    wire.close()


def test_a_message_that_is_too_long_is_refused_before_it_is_sent():
    with pytest.raises(ValueError, match="shorten the prompt"):
        encode({"text": "x" * MAX_MESSAGE_BYTES})


def test_a_closed_end_is_told_apart_from_garbage(ends):
    raw, wire = ends
    raw.close()
    with pytest.raises(WireClosedError):
        wire.arrived(60.0)
    with pytest.raises(WireClosedError):
        wire.send(encode({"a": 1}))
    assert wire.has_hung_up(0.0)
    wire.close()


def test_the_host_ends_with_an_error_when_it_reads_garbage(ends):
    raw, wire = ends
    raw.sendall(frame(0, b"hello"))
    with pytest.raises(WireError, match="is not JSON"):
        Host(wire, Heartbeat(wire, parent=0, heartbeat_seconds=1.0, folder="")).serve()
    wire.close()


def shake(wire, token, starts, outcomes):
    try:
        wire.handshake(token, starts=starts, timeout_seconds=60.0)
        outcomes[starts] = "trusted"
    except WireError as error:
        outcomes[starts] = str(error)
        wire.close()


@pytest.mark.parametrize(("theirs", "is_trusted"), [("right", True), ("wrong", False)])
def test_both_ends_must_know_the_token(theirs, is_trusted):
    left, right = (Wire(end) for end in socket.socketpair())
    outcomes = {}
    thread = threading.Thread(target=shake, args=[left, theirs, True, outcomes])
    thread.start()
    shake(right, "right", False, outcomes)
    thread.join(timeout=60)
    assert (outcomes[False] == "trusted") == is_trusted
    assert (outcomes[True] == "trusted") == is_trusted
    assert is_trusted or "does not know the token" in outcomes[False]
    left.close()
    right.close()
