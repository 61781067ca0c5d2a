"""A reward model answers over HTTP, to those who have the key."""

import http.client
import json
import threading

import pytest
import torch

from tests.workers.reward_model.models import character_tokenizer, reward_model, save
from verl.config.reward import FSDPRewardModelConfig, FSDPRewardModelModelConfig
from verl.workers.reward_model.server import (
    MAX_BODY_BYTES,
    MAX_TEXTS,
    RewardModelManager,
    RewardModelServer,
)


@pytest.fixture
def server():
    made = RewardModelServer()
    made.score_texts = lambda texts: [float(len(text)) for text in texts]
    yield made
    made.close()


def post(address, endpoint, body, headers=None):
    host, _, key = address.partition("/")
    connection = http.client.HTTPConnection(host, timeout=60)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", f"/{key}/{endpoint}", content, headers or {})
    answer = connection.getresponse()
    result = answer.status, json.loads(answer.read())
    connection.close()
    return result


def test_the_score_is_where_vllm_and_sglang_put_it(server):
    _, found = post(server.address, "classify", {"model": "m", "input": ["a", "bcd"]})
    assert [row["probs"] for row in found["data"]] == [[1.0], [3.0]]
    _, found = post(server.address, "v1/embeddings", {"model": "m", "input": "bcd"})
    assert found["data"][0]["embedding"][-1] == 3.0


@pytest.mark.parametrize("key", ["", "wrong"])
def test_without_the_key_there_is_no_answer(server, key):
    host = server.address.partition("/")[0]
    status, found = post(f"{host}/{key}", "classify", b"never read, so it may be no JSON")
    assert status == 403
    assert "data" not in found


@pytest.mark.parametrize(
    ("endpoint", "body", "status"),
    [
        ("generate", {"input": "a"}, 404),
        ("classify", b"no json", 400),
        ("classify", b"[" * 100_000, 400),
        ("classify", [], 400),
        ("classify", {"input": 7}, 400),
        ("classify", {"input": []}, 400),
        ("classify", {"input": [""]}, 400),
        ("classify", {"input": ["a"] * (MAX_TEXTS + 1)}, 400),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(server, endpoint, body, status):
    assert post(server.address, endpoint, body)[0] == status


def test_a_body_that_is_too_large_is_not_read(server):
    headers = {"Content-Length": str(MAX_BODY_BYTES + 1)}
    assert post(server.address, "classify", b"{}", headers)[0] == 413


def test_an_error_of_the_model_is_reported_and_the_server_lives_on(server):
    def broken(texts):
        raise RuntimeError("out of memory")

    works, server.score_texts = server.score_texts, broken
    assert post(server.address, "classify", {"input": "a"}) == (
        500,
        {"error": "RuntimeError: out of memory"},
    )
    server.score_texts = works
    assert post(server.address, "classify", {"input": "a"})[0] == 200


def test_texts_are_scored_one_request_at_a_time(server):
    open_now, most = [0], [0]

    def slow(texts):
        open_now[0] += 1
        most[0] = max(most[0], open_now[0])
        threading.Event().wait(0.02)
        open_now[0] -= 1
        return [0.0] * len(texts)

    server.score_texts = slow
    threads = [
        threading.Thread(target=post, args=(server.address, "classify", {"input": "a"}))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most[0] == 1


def test_a_manager_serves_the_model_until_it_sleeps(tmp_path):
    path = save(reward_model("llama"), tmp_path)
    model = FSDPRewardModelModelConfig(path=path, input_tokenizer=None)
    manager = RewardModelManager(FSDPRewardModelConfig(enable=True, model=model))
    try:
        address = manager.get_router_address()
        _, found = post(address, "classify", {"input": ["2+2=4", "<s>2+2=5</s>"]})
        scores = [row["probs"][0] for row in found["data"]]
        for text, score in zip(["2+2=4", "<s>2+2=5</s>"], scores, strict=True):
            ids = torch.tensor([character_tokenizer()(text)["input_ids"]])
            expected = reward_model("llama")(input_ids=ids).logits[0, 0].item()
            assert score == pytest.approx(expected, abs=1e-5)
        manager.sleep()
        assert post(address, "classify", {"input": "a"})[0] == 503
        manager.wake_up()
        assert post(address, "classify", {"input": "a"})[0] == 200
    finally:
        manager.close()
