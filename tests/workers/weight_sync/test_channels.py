import multiprocessing
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest
import torch

from tests.utils.two_ranks import run_on_two_ranks
from tests.workers.weight_sync.models import are_equal, receiver_for, small_weights
from verl.workers.weight_sync import (
    Bucket,
    Published,
    ReceivingChannel,
    SendingChannel,
    WeightReceiver,
    WeightSender,
    receive_weights,
    send_weights,
)
from verl.workers.weight_sync.bucket import (
    ChannelError,
    DamagedBucketError,
    SyncRefusedError,
    WrongWeightsError,
)
from verl.workers.weight_sync.channel import parse_confirmation
from verl.workers.weight_sync.shared_memory import (
    SHARED_FOLDER,
    SharedMemoryReceiver,
    SharedMemorySender,
    reserve_file,
)
from verl.workers.weight_sync.streaming import stream_weights
from verl.workers.weight_sync.tcp import TcpListener, TcpSender

TOKEN = "correct horse battery staple"


def send_two_versions(channel) -> list[int]:
    sender = WeightSender(40)
    return [
        send_weights(sender, small_weights(seed=version).items(), version, channel).fingerprint
        for version in (1, 2)
    ]


def receive_two_versions(channel: ReceivingChannel) -> list[int]:
    targets, receiver = receiver_for(small_weights())
    fingerprints = []
    for version in (1, 2):
        fingerprints.append(receive_weights(receiver, channel).fingerprint)
        assert receiver.version == version
        assert are_equal(targets, small_weights(seed=version))
    return fingerprints


def outcome_of_wrong_weights(rank: int, end: Connection) -> str:
    """The receiver has another model: both sides must end, each with its own error."""
    try:
        if rank == 0:
            channel = SharedMemorySender([end])
            send_weights(WeightSender(40), small_weights().items(), 3, channel)
        else:
            receiver = WeightReceiver({"other": torch.zeros(1)})
            receive_weights(receiver, SharedMemoryReceiver(end, timeout_seconds=30))
    except (SyncRefusedError, WrongWeightsError) as error:
        return type(error).__name__
    return "no error"


def test_two_processes_agree_over_every_channel(tmp_path):
    near, far = multiprocessing.Pipe()
    listener = TcpListener(TOKEN)
    shared = tmp_path / "shared"
    shared.mkdir()

    def work(rank: int) -> tuple[list[list[int]], str]:
        if rank == 0:
            results = [send_two_versions(SharedMemorySender([near], folder=str(shared)))]
            address = (listener.host, listener.port)
            results.append(send_two_versions(TcpSender([address], TOKEN, timeout_seconds=30)))
        else:
            results = [receive_two_versions(SharedMemoryReceiver(far, timeout_seconds=30))]
            results.append(receive_two_versions(listener.accept(timeout_seconds=30)))
        return results, outcome_of_wrong_weights(rank, near if rank == 0 else far)

    (sent, sender_error), (received, receiver_error) = run_on_two_ranks(work, tmp_path)
    listener.close()
    assert sent == received
    assert sent[0] == sent[1]
    assert sender_error == "SyncRefusedError"
    assert receiver_error == "WrongWeightsError"
    assert not list(shared.iterdir())


def over_tcp(send, receive):
    """What `receive(channel)` gave while `send(channel)` ran; both in this process."""
    listener = TcpListener(TOKEN)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(lambda: listener.accept(max_bucket_bytes=100, timeout_seconds=20))
        channel = TcpSender([(listener.host, listener.port)], TOKEN, timeout_seconds=20)
        receiving = accepted.result(20)
        for stream in (receiving._stream, *channel._streams):  # a confirmation does not wait
            assert stream._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        answer = pool.submit(receive, receiving)
        try:
            send(channel)
        finally:
            outcome = answer.exception(20) or answer.result(20)
            channel.close()
            receiving.close()
            listener.close()
    return outcome


class Meddler(SendingChannel):
    """Does something to the bucket at one place on its way."""

    def __init__(self, channel: SendingChannel, place: int, fault: str = "flip") -> None:
        self.channel = channel
        self.place = place
        self.fault = fault
        self.seen: list[Bucket] = []

    def send(self, bucket: Bucket) -> None:
        self.seen.append(replace(bucket, payload=bucket.payload.clone()))
        is_due = bucket.index == self.place
        if is_due and self.fault == "flip":
            bucket.payload[5] ^= 1
        if is_due and self.fault == "old":
            self.channel.send(OLD[self.place])
        if not (is_due and self.fault == "drop"):
            self.channel.send(bucket)
        if is_due and self.fault == "repeat":
            self.channel.send(self.seen[-1])

    def confirmations(self) -> list[Published | None]:
        return self.channel.confirmations()


OLD = [
    replace(bucket, payload=bucket.payload.clone())
    for bucket in WeightSender(40).buckets(small_weights(seed=1).items(), 1)
]


def both_ends(kind, folder):
    """A sending and a receiving channel of that kind, and what closes them."""
    if kind == "shared memory":
        near, far = multiprocessing.Pipe()
        ends = (
            SharedMemorySender([near], folder=str(folder), timeout_seconds=20),
            SharedMemoryReceiver(far, timeout_seconds=20),
        )
        return *ends, (near, far)
    listener = TcpListener(TOKEN)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(lambda: listener.accept(timeout_seconds=20))
        channel = TcpSender([(listener.host, listener.port)], TOKEN, timeout_seconds=20)
        receiving = accepted.result(20)
    return channel, receiving, (channel, receiving, listener)


@pytest.mark.parametrize("kind", ["shared memory", "tcp"])
@pytest.mark.parametrize("fault", ["drop", "flip", "repeat", "old"])
@pytest.mark.parametrize("way", ["into tensors", "streamed"])
def test_no_channel_serves_an_update_that_was_damaged_on_its_way(tmp_path, kind, fault, way):
    """Engines in this process are written into, others take a stream of tensors."""
    weights = small_weights(seed=2)
    targets, receiver = receiver_for(weights)
    streamed: dict[str, torch.Tensor] = {}

    def receive(channel):
        if way == "into tensors":
            return receive_weights(receiver, channel)
        return stream_weights(channel, streamed.update)

    for place in range(len(OLD) - 1):  # without the last bucket a receiver waits for its deadline
        channel, receiving, ends = both_ends(kind, tmp_path)
        sender = WeightSender(40)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(receive, receiving)
            try:
                send_weights(sender, weights.items(), 2, Meddler(channel, place, fault))
                is_held = True
            except SyncRefusedError:
                is_held = False
            refusal = answer.exception(20)
            assert is_held == (refusal is None), "both sides know how it ended"
            assert not is_held or fault in ("repeat", "old"), "the rest of it was whole"
            assert not (is_held and way == "streamed"), "what was handed on cannot be taken back"
            if is_held:
                assert are_equal(targets, weights)
            elif way == "into tensors":
                assert receiver.held is None or are_equal(targets, weights)
            answer = pool.submit(receive, receiving)
            send_weights(sender, weights.items(), 3, channel)
            answer.result(20)
        assert are_equal(targets if way == "into tensors" else streamed, weights)
        for end in ends:
            end.close()
        targets, receiver = receiver_for(weights)


def test_a_damaged_bucket_fails_on_both_sides_and_the_next_attempt_succeeds():
    weights = small_weights()
    targets, receiver = receiver_for(weights)
    sender = WeightSender(40)

    def send(channel: TcpSender) -> None:
        with pytest.raises(SyncRefusedError, match=r"1 of 1 receivers \(numbers \[0\]\)"):
            send_weights(sender, weights.items(), 1, Meddler(channel, place=1))
        send_weights(sender, weights.items(), 1, channel)
        with pytest.raises(SyncRefusedError):  # an update counts by itself, not by what came before
            send_weights(sender, weights.items(), 1, Meddler(channel, place=0))

    def receive(channel: ReceivingChannel) -> str:
        with pytest.raises(DamagedBucketError, match="bucket 1 of version 1"):
            receive_weights(receiver, channel)
        receive_weights(receiver, channel)
        with pytest.raises(DamagedBucketError):
            receive_weights(receiver, channel)
        return "done"

    assert over_tcp(send, receive) == "done"
    assert are_equal(targets, weights)


def test_a_payload_beyond_the_agreed_size_is_refused_before_memory_is_taken():
    weights = small_weights()

    def send(channel: TcpSender) -> None:
        with pytest.raises(ChannelError):
            send_weights(WeightSender(101), weights.items(), 1, channel)

    outcome = over_tcp(send, lambda channel: receive_weights(receiver_for(weights)[1], channel))
    assert isinstance(outcome, ChannelError)
    assert "a payload of 101 bytes; the limits are" in str(outcome)


def test_peers_without_the_token_are_turned_away_and_the_right_one_still_gets_in():
    listener = TcpListener(TOKEN)
    address = (listener.host, listener.port)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(lambda: listener.accept(timeout_seconds=20))
        for wrong in ("guess", TOKEN + "x"):
            with pytest.raises(ChannelError, match="closed the connection"):
                TcpSender([address], wrong)
        with socket.create_connection(address, timeout=5) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 100)
        channel = TcpSender([address], TOKEN)
        accepted.result(20).close()
        channel.close()
    listener.close()


def test_a_listener_that_does_not_know_the_token_gets_no_weights():
    impostor = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        peer, _ = impostor.accept()
        with peer:
            peer.sendall(b"n" * 32)
            received = b""
            while len(received) < 64:
                received += peer.recv(64)
            peer.sendall(received[32:])  # what the sender signed, played back to it

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(ChannelError, match="does not know the token"):
        TcpSender([impostor.getsockname()], TOKEN)
    thread.join(10)
    impostor.close()


def test_a_listener_gives_up_at_its_deadline_and_needs_a_token():
    listener = TcpListener(TOKEN)
    with pytest.raises(ChannelError, match=r"no sender with the right token came .* in 0.05 s"):
        listener.accept(timeout_seconds=0.05)
    listener.close()
    with pytest.raises(ChannelError, match="cannot be reached"):
        TcpSender([(listener.host, listener.port)], TOKEN)
    with pytest.raises(ValueError, match="need a token"):
        TcpListener("")


def test_a_silent_or_dead_peer_of_shared_memory_is_named(tmp_path):
    near, far = multiprocessing.Pipe()
    weights = small_weights()
    channel = SharedMemorySender([near], folder=str(tmp_path), timeout_seconds=0.05)
    with pytest.raises(ChannelError, match=r"receiver 0 was silent for 0.05 s"):
        send_weights(WeightSender(40), weights.items(), 1, channel)
    far.close()
    channel = SharedMemorySender([near], folder=str(tmp_path))
    with pytest.raises(ChannelError, match="receiver 0 is gone"):
        send_weights(WeightSender(40), weights.items(), 1, channel)
    assert not list(tmp_path.iterdir())


def test_one_file_serves_all_buckets_of_shared_memory(tmp_path):
    near, far = multiprocessing.Pipe()
    weights = small_weights()
    sender, receiver = WeightSender(40), receiver_for(weights)[1]
    receiving = SharedMemoryReceiver(far, timeout_seconds=20)
    channel = SharedMemorySender([near], folder=str(tmp_path), timeout_seconds=20)
    memories = set()
    with ThreadPoolExecutor(1) as pool:
        for version in range(3):
            received = pool.submit(receive_weights, receiver, receiving)
            send_weights(sender, weights.items(), version, channel)
            received.result(20)
            memories.add(receiving._memory.data_ptr())
    assert len(memories) == 1
    assert receiver.version == 2


def test_full_shared_memory_is_an_error_with_a_cure():
    before = set(os.listdir(SHARED_FOLDER))
    with pytest.raises(ChannelError, match=r"has no room for a bucket .*--shm-size"):
        reserve_file(SHARED_FOLDER, 2**55)
    assert not [n for n in set(os.listdir(SHARED_FOLDER)) - before if n.startswith("verl-weights-")]


@pytest.mark.parametrize("answer", [b"", b"refused", b"holds", b"holds" + b"1" * 15, b"x" * 21])
def test_an_answer_that_names_no_version_is_a_refusal(answer):
    assert parse_confirmation(answer) is None
