"""What happens when SGLang's server dies, lies, refuses or falls silent. A server each: slow."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.workers.rollout.helpers import training_log_probs
from tests.workers.rollout.sglang.engines import (
    ADAPTER,
    PROMPT,
    PROTOCOL_SERVER,
    ask,
    changed,
    engine_options,
    lora_update,
    merged,
    named_weights,
    rollout_config,
    save_model,
    start_engine,
    trained_model,
)
from verl.config.serving import ServerConfig
from verl.workers.rollout.base import EngineLostError, TokenOutput
from verl.workers.rollout.process.client import EngineProcess, EngineStartError
from verl.workers.weight_sync import WeightsNotReadyError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUICK_SERVER = ServerConfig(timeout=3.0, retry_delay=0.1, max_start_wait_time=120.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@contextmanager
def running(folder: str, **options: Any) -> Iterator[EngineProcess]:
    engine = start_engine(engine_options(folder, **options))
    try:
        yield engine
    finally:
        engine.close()


def generate(engine: EngineProcess, **params: Any) -> TokenOutput:
    ((output,),) = engine.generate_batch([ask(**params)])
    return output


def server_pids(folder: str) -> list[int]:
    """Protocol servers that serve this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if PROTOCOL_SERVER in words and folder in words:
                found.append(int(entry.name))
    return found


def wait_until_gone(folder: str) -> None:
    deadline = time.monotonic() + 60
    while server_pids(folder):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_after_the_death_of_the_server_nothing_is_served_until_weights_came_again(folder):
    model = trained_model()
    with running(folder) as engine:
        engine.update_weights(named_weights(model), version=1)
        before = generate(engine, temperature=0.0)
        (pid,) = server_pids(folder)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineLostError, match="SIGKILL"):
            generate(engine)
        engine.restart()
        with pytest.raises(WeightsNotReadyError):
            generate(engine)
        engine.update_weights(named_weights(model), version=2)
        after = generate(engine, temperature=0.0)
        assert (after.token_ids, after.policy_versions) == (before.token_ids, [2] * 12)
    wait_until_gone(folder)


def test_the_server_ends_with_the_process_that_started_it(folder):
    with running(folder, has_weights=True) as engine:
        (pid,) = server_pids(folder)
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        wait_until_gone(folder)
        with pytest.raises(EngineLostError):
            generate(engine)


def test_a_version_that_the_server_did_not_take_over_is_noticed_at_once(folder):
    with running(folder, own={"fault": "withhold"}) as engine:
        engine.update_weights(named_weights(trained_model()), version=1)
        with pytest.raises(EngineLostError, match="'1' were loaded last"):
            generate(engine)


def test_weights_that_only_seem_to_be_taken_over_show_in_the_log_probs(folder):
    model = changed(trained_model(), seed=5)
    with running(folder, own={"fault": "pretend"}) as engine:
        engine.update_weights(named_weights(model), version=1)
        output = generate(engine, temperature=0.0)
        expected = training_log_probs(model, PROMPT, output.token_ids)
        assert (expected - expected.new_tensor(output.log_probs)).abs().max() > 0.5


def test_a_server_that_refuses_weights_serves_nothing(folder):
    with running(folder, own={"fault": "refuse_weights"}) as engine:
        with pytest.raises(ValueError, match="this server refuses weights"):
            engine.update_weights(named_weights(trained_model()), version=1)
        with pytest.raises(WeightsNotReadyError):
            generate(engine)


def test_a_silent_server_is_lost_after_the_timeout(folder):
    rollout = rollout_config(server=QUICK_SERVER)
    with running(folder, rollout=rollout, own={"fault": "silent"}) as engine:
        engine.update_weights(named_weights(trained_model()), version=1)
        began = time.monotonic()
        with pytest.raises(EngineLostError, match=r"rollout\.server\.timeout allows 3"):
            generate(engine)
        assert time.monotonic() - began >= 3


def test_arguments_that_the_server_does_not_have_are_refused_by_name(folder):
    with pytest.raises(ValueError, match=r"engine_kwargs\.sglang\.attention_backends is no arg"):
        start_engine(engine_options(folder, own={"attention_backends": "fa3"}))
    with pytest.raises(ValueError, match=r"mem_fraction is no .* did you mean 'mem_fraction_st"):
        start_engine(engine_options(folder, own={"mem_fraction": 0.5}))


def test_a_server_that_does_not_start_is_reported_with_its_stderr_tail(folder):
    options = engine_options(folder)
    options["arguments"]["model_path"] = f"{folder}/nowhere"
    with pytest.raises(EngineStartError, match="nowhere"):
        start_engine(options)


def test_updates_of_an_adapter_replace_the_one_before(folder):
    with running(folder, adapter=ADAPTER) as engine:
        for version in (1, 2):
            adapter = lora_update(trained_model(), seed=version)
            engine.update_weights(adapter.items(), version=version)
            output = generate(engine, temperature=0.0)
            expected = training_log_probs(
                merged(trained_model(), adapter), PROMPT, output.token_ids
            )
            assert output.log_probs == pytest.approx(expected.tolist(), abs=1e-3)
            assert output.policy_versions == [version] * len(output.token_ids)
        with pytest.raises(ValueError, match="takes the adapter's tensors alone"):
            engine.update_weights(named_weights(trained_model()), version=3)
