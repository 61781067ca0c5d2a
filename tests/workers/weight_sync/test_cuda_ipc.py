"""Weights that stay on their GPU: the ticket on a CPU, the whole way on a GPU."""

import multiprocessing

import pytest
import torch

from tests.workers.weight_sync.models import are_equal, small_weights
from verl.workers.weight_sync import WeightReceiver, WeightSender, receive_weights, send_weights
from verl.workers.weight_sync.bucket import ChannelError
from verl.workers.weight_sync.cuda_ipc import (
    CudaIpcReceiver,
    CudaIpcSender,
    decode_ticket,
    encode_ticket,
    frame_head,
    opened,
    split_head,
)


def test_a_ticket_is_plain_text_and_reads_back_as_it_was():
    parts = [b"\x00\xffhandle", 4096, 512, b"", 0, b"event", True]
    ticket = encode_ticket("GPU-7", parts)
    assert decode_ticket(ticket) == ("GPU-7", parts)
    assert ticket.isascii()


@pytest.mark.parametrize(
    "ticket", [b"", b"\xff", b"[]", b'["GPU", 3]', b'["GPU", [null]]', b'["GPU", ["xzz"]]']
)
def test_a_ticket_that_cannot_be_read_is_refused(ticket):
    with pytest.raises(ChannelError, match="cannot be read"):
        decode_ticket(ticket)


def test_a_header_travels_with_the_size_of_what_stays_on_the_gpu():
    (bucket,) = WeightSender(1000).buckets(small_weights().items(), version=1)
    assert split_head(frame_head(bucket)) == (bucket.header(), 155)


def test_a_gpu_that_this_process_does_not_see_is_named():
    with pytest.raises(ChannelError, match=r"GPU-elsewhere.*CUDA_VISIBLE_DEVICES"):
        opened(encode_ticket("GPU-elsewhere", [b"handle", 1]))


def receive_on_gpu(pipe, answers):
    held = {name: torch.zeros_like(w, device="cuda") for name, w in small_weights().items()}
    receiver = WeightReceiver(held)
    for seed in range(2):
        receive_weights(receiver, CudaIpcReceiver(pipe, timeout_seconds=60.0))
        expected = {name: w.cuda() for name, w in small_weights(seed).items()}
        answers.send_bytes(b"equal" if are_equal(held, expected) else b"different")


@pytest.mark.gpu
@pytest.mark.parametrize("bucket_bytes", [64, 1000])
def test_two_processes_share_weights_on_a_gpu(bucket_bytes):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    answers, said = context.Pipe()
    child = context.Process(target=receive_on_gpu, args=(theirs, said), daemon=True)
    child.start()
    sender = WeightSender(bucket_bytes)
    try:
        for seed in range(2):
            weights = {name: w.cuda() for name, w in small_weights(seed).items()}
            channel = CudaIpcSender([ours], timeout_seconds=60.0)
            assert send_weights(sender, weights.items(), seed, channel).version == seed
            assert answers.poll(60)
            assert answers.recv_bytes() == b"equal"
        child.join(timeout=60)
        assert child.exitcode == 0
    finally:
        child.kill()
