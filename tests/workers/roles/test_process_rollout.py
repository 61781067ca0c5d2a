"""A policy whose rollout engine runs in a process of its own."""

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from tests.tiny_tokenizer import save_tiny_model
from tests.workers.roles.test_roles import RESPONSE, annotated, policy
from verl.protocol import DataProto
from verl.single_controller import WorkerError
from verl.workers.rollout.base import EngineLostError, GenerationRequest, SamplingParams
from verl.workers.rollout.publish import publisher_of
from verl.workers.weight_sync import WeightsNotReadyError

PHASES = ("wake_up", "transfer", "load", "check")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def apart(model_path):
    workers = policy(model_path, name="native_process")
    yield workers
    workers.workers[0].stop_rollout()


@pytest.fixture(scope="module")
def beside(model_path):
    return policy(model_path)


def answer(workers, seed=3):
    params = SamplingParams(max_tokens=RESPONSE, seed=seed)
    request = GenerationRequest(request_id="a", prompt_ids=[5, 6, 7], params=params, num_samples=2)
    return workers.workers[0].rollout.generate_batch([request])[0]


def kill_engine(workers):
    process = workers.workers[0].rollout
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)


def published(workers):
    return publisher_of(workers.workers[0].config, workers, workers).publish()


def train_both(apart, beside):
    """The metrics of an update and of its publication."""
    found = []
    for workers in (apart, beside):
        metrics = workers.update_actor(annotated(workers)).meta_info["metrics"]
        found.append({**metrics, **published(workers)})
    return found


def test_it_answers_as_the_engine_on_the_trained_weights_does_after_every_update(apart, beside):
    for version in (0, 1):
        assert apart.rollout_version() == [version]
        assert answer(apart) == answer(beside)
        found, expected = train_both(apart, beside)
        assert found["rollout/canary_max_diff"] < 1e-4
        assert "rollout/canary_max_diff" not in expected, "it shares the storage"
        assert found["actor/pg_loss"] == expected["actor/pg_loss"]
        phases = [found.get(f"timing_s/update_weights/{phase}", -1.0) for phase in PHASES]
        assert min(phases) >= 0.0
        assert 0.0 < sum(phases) <= found["timing_s/update_weights"]


def test_weights_are_published_while_requests_run(apart, beside):
    process, trained = apart.workers[0].rollout, apart.workers[0].engine
    before, has_ended = trained.policy_version, threading.Event()
    params = SamplingParams(max_tokens=RESPONSE, ignore_eos=True)
    asked = [
        GenerationRequest(request_id=str(n), prompt_ids=[5, n], params=params, num_samples=8)
        for n in range(3, 90)
    ]
    with process.together():
        futures = [process.submit(one, lambda *end: has_ended.set()) for one in asked]
    assert has_ended.wait(60)
    trained.policy_version += 1  # of the same weights
    publisher = publisher_of(apart.workers[0].config, apart, apart)
    metrics = publisher.publish(in_flight=True)
    outputs = [output for future in futures for output in future.result(60)]
    assert all(output.stop_reason == "length" for output in outputs)
    versions = {version for output in outputs for version in output.policy_versions}
    assert versions <= {before, before + 1}
    assert metrics["timing_s/update_weights/stall"] > 0
    assert apart.rollout_version() == [before + 1]
    trained.policy_version = before
    apart.update_weights()
    assert answer(apart) == answer(beside)


@pytest.mark.slow
def test_an_engine_that_dies_serves_nothing_until_it_has_the_trained_weights_again(apart, beside):
    kill_engine(apart)
    assert apart.rollout_is_alive() == [False]
    with pytest.raises(EngineLostError, match="process is lost"):
        answer(apart)
    apart.workers[0].rollout.restart()
    with pytest.raises(WeightsNotReadyError):
        answer(apart)
    apart.update_weights()
    assert apart.rollout_version() == beside.rollout_version()
    assert answer(apart) == answer(beside)


def test_an_engine_that_dies_in_the_middle_of_an_update_gets_it_after_its_restart(apart, beside):
    trained = apart.workers[0].engine
    whole, num_updates = trained.get_per_tensor_param, []

    def fatal_once():
        num_updates.append(0)
        for place, weight in enumerate(whole()):
            if len(num_updates) == 1 and place == 2:
                kill_engine(apart)
            yield weight

    trained.get_per_tensor_param = fatal_once
    try:
        train_both(apart, beside)
    finally:
        del trained.get_per_tensor_param
    assert len(num_updates) == 2, "it was sent again, once"
    assert apart.rollout_version() == beside.rollout_version()
    assert answer(apart) == answer(beside)


def test_an_update_that_is_refused_stops_the_run_and_nothing_is_served(apart, beside, monkeypatch):
    trained = apart.workers[0].engine
    trained.policy_version += 1
    whole = trained.get_per_tensor_param

    def torn():
        return iter([(name, weight[:1]) for name, weight in whole()])

    monkeypatch.setattr(trained, "get_per_tensor_param", torn)
    with pytest.raises(WorkerError, match="has shape"):
        apart.update_weights()
    with pytest.raises(WeightsNotReadyError):
        answer(apart)
    monkeypatch.undo()
    trained.policy_version -= 1
    apart.update_weights()
    assert answer(apart) == answer(beside)


def test_it_gives_memory_back_and_takes_it_again_for_requests_and_for_weights(apart, beside):
    apart.rollout_sleep()
    apart.rollout_wake_up()
    assert answer(apart) == answer(beside)
    batch = annotated(beside)
    apart.rollout_sleep()
    for workers in (apart, beside):
        workers.update_actor(batch)
        published(workers)
    assert answer(apart) == answer(beside)
    apart.rollout_sleep()
    prompts = DataProto(non_tensor_batch={"raw_prompt": np.array(["1+1="] * 2, dtype=object)})
    prompts.meta_info["do_sample"] = False
    found, expected = (workers.generate_sequences(prompts) for workers in (apart, beside))
    assert torch.equal(found.batch["responses"], expected.batch["responses"])


def test_it_follows_a_policy_that_goes_back_to_a_checkpoint(apart, beside, tmp_path):
    before = answer(apart)
    version = apart.rollout_version()
    apart.save_checkpoint(str(tmp_path))
    train_both(apart, beside)
    assert answer(apart) == answer(beside) != before
    apart.load_checkpoint(str(tmp_path))
    assert apart.rollout_version() == version
    assert answer(apart) == before
