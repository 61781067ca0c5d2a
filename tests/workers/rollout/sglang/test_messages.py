"""Requests as the server gets them, and its messages as we take them; no server is needed."""

from random import Random

import pytest
import torch

from tests.workers.rollout.sglang.engines import ask
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.sglang_rollout.arguments import generate_body
from verl.workers.rollout.sglang_rollout.hosted import weight_folder
from verl.workers.rollout.sglang_rollout.streams import RunningSample


def body(request, **options) -> dict:
    chosen = {"max_tokens": 9, "end_tokens": [2], "fresh_seeds": Random(0), "adapter": None}
    return generate_body(7, request, **{**chosen, **options})


def message(token_ids: list[int], finish: dict | None = None, **changes) -> dict:
    facts = {
        "id": "7-0.",
        "finish_reason": finish,
        "weight_version": "1",
        "output_token_logprobs": [[-0.5 - i, token, None] for i, token in enumerate(token_ids)],
    }
    return {"output_ids": token_ids, "meta_info": {**facts, **changes}, "index": 0}


def sample(**params) -> RunningSample:
    return RunningSample(0, SamplingParams(**params), lambda ids: "".join(map(chr, ids)))


def test_each_sample_has_a_name_that_begins_no_other_name():
    names = body(ask(num_samples=12))["rid"]
    assert names[1] == "7-1."
    assert not any(a != b and b.startswith(a) for a in names for b in names)


def test_samples_share_a_prompt_and_have_seeds_of_their_own():
    sent = body(ask([4, 5], num_samples=2, seeds=(3, 4), top_k=0, temperature=0.7))
    first, second = sent["sampling_params"]
    assert sent["input_ids"] == [[4, 5], [4, 5]]
    assert first["sampling_seed"] != second["sampling_seed"]
    assert 0 <= first["sampling_seed"] < 2**63
    assert first | {"sampling_seed": 0} == second | {"sampling_seed": 0}
    assert (first["top_k"], first["temperature"], first["max_new_tokens"]) == (-1, 0.7, 9)
    assert first["stop_token_ids"] == [2]
    assert "lora_path" not in sent


def test_requests_without_seeds_get_fresh_ones():
    seeds = Random(0)
    drawn = [
        params["sampling_seed"]
        for _ in range(2)
        for params in body(ask(num_samples=3), fresh_seeds=seeds)["sampling_params"]
    ]
    assert len(set(drawn)) == 6


def test_a_request_names_the_adapter_for_each_sample():
    assert body(ask(num_samples=2), adapter="policy-3")["lora_path"] == ["policy-3", "policy-3"]


def test_messages_become_deltas():
    running = sample()
    delta = running.take(message([5, 6]))
    assert (delta.token_ids, delta.log_probs) == ((5, 6), (-0.5, -1.5))
    assert (delta.stop_reason, running.is_over) == ("", False)
    assert running.take(message([7], {"type": "length", "length": 3})).stop_reason == "length"
    assert running.is_over


def test_a_text_is_found_across_messages_and_cuts_what_came_after_it():
    running = sample(stop=("bc",))
    assert running.take(message([ord("a"), ord("b")])).stop_reason == ""
    delta = running.take(message([ord("c"), ord("d"), ord("e")]))
    assert (delta.token_ids, delta.log_probs) == ((ord("c"),), (-0.5,))
    assert (delta.stop_reason, running.is_over) == ("stop", True)


def test_the_first_of_several_ends_counts():
    running = sample(stop=("c",), stop_token_ids=(ord("b"),), ignore_eos=True)
    delta = running.take(message([ord("a"), ord("b"), ord("c")]))
    assert delta.token_ids == (ord("a"), ord("b"))
    assert delta.stop_reason == "stop"


def test_tokens_without_their_log_probs_are_refused():
    with pytest.raises(RuntimeError, match="incremental-streaming-output"):
        sample().take(message([5, 6], output_token_logprobs=[[-0.5, 5, None]]))


def test_an_abort_of_the_servers_own_is_no_answer():
    asked = {"type": "abort"}
    assert sample().take(message([], asked)).stop_reason == "abort"
    own = {"type": "abort", "status_code": 503, "message": "the queue is full"}
    with pytest.raises(RuntimeError, match="the queue is full"):
        sample().take(message([], own))


def test_weights_lie_in_a_private_folder_only_as_long_as_they_are_needed():
    from safetensors.torch import load_file

    memory = torch.arange(4.0)

    def reused():
        for value in (1.0, 2.0):
            yield f"w{value:g}", memory.fill_(value)  # as a channel does with its buffers

    with weight_folder(reused()) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
    assert not folder.exists()
    assert [tensors[name].tolist() for name in ("w1", "w2")] == [[1.0] * 4, [2.0] * 4]


def test_a_broken_update_leaves_no_folder_behind(tmp_path):
    def broken():
        yield "w", torch.ones(2)
        raise ConnectionError("cut off")

    with pytest.raises(ConnectionError), weight_folder(broken(), parent=tmp_path):
        raise AssertionError("nothing may be loaded")
    assert list(tmp_path.iterdir()) == []


def test_a_large_model_is_several_files(tmp_path):
    weights = [(f"w{i}", torch.full((2,), float(i))) for i in range(5)]  # of 8 bytes each
    with weight_folder(weights, parent=tmp_path, file_bytes=16) as folder:
        assert len(list(folder.glob("*.safetensors"))) == 3


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(tmp_path):
    left_over = tmp_path / "verl-weights-dead"
    left_over.mkdir()
    (left_over / "lock").touch()
    with weight_folder([("w", torch.ones(2))], parent=tmp_path) as in_use:
        assert not left_over.exists()
        with weight_folder([("w", torch.ones(2))], parent=tmp_path):
            assert (in_use / "weights-00000.safetensors").exists()
