import asyncio
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from tests.compat.test_light_imports import loaded_by
from tests.trainer.generation.cases import (
    config_of,
    generated,
    responses_of,
    rows,
    written,
)
from verl.config.faults import ConfigError
from verl.config.generation import GenerationConfig
from verl.config.load import load_config
from verl.trainer import main_generation
from verl.trainer.generation.engines import device_shares, process_name, start_engines
from verl.utils.device import STAND_INS

NUM_ROWS = 20
DEADLINE_SECONDS = 100


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return written(tmp_path_factory.mktemp("prompts") / "prompts.parquet", rows(NUM_ROWS))


def loaded(model, source, output, **changes):
    values = {
        "data": {"path": source, "output_path": str(output)},
        "model": {"path": model},
        "trainer": {"n_gpus_per_node": 1, "device": "cpu"},
    }
    values["data"] |= {"n_samples": 5}
    values["rollout"] = {"prompt_length": 8}
    for name, value in changes.items():
        section, _, key = name.partition("_")
        values.setdefault(section, {})[key] = value
    return load_config(values, GenerationConfig)


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_temperature": 0.0}, "data.n_samples is 5, but rollout.temperature is 0"),
        ({"rollout_do_sample": False}, "data.n_samples is 5, but rollout.do_sample is off"),
        ({"trainer_nnodes": 2, "trainer_controller": "local"}, "several machines need Ray"),
        (
            {"rollout_tensor_model_parallel_size": 2},
            "must divide trainer.n_gpus_per_node \\(1\\)",
        ),
        ({"data_output_path": "hdfs://there/out.parquet"}, "it must be a local file"),
        ({"data_output_path": "."}, "a folder; it must be a file"),
        ({"model_path": "./absent"}, 'model.path is "./absent", which does not exist'),
    ],
)
def test_a_mistake_is_refused_with_the_way_out(model, source, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        main_generation.run(loaded(model, source, tmp_path / "out.parquet", **changes))


def test_a_mistake_is_reported_without_loading_torch():
    assert not {"torch", "transformers"} & loaded_by("verl.trainer.main_generation")


def test_the_input_is_never_overwritten(model, source):
    with pytest.raises(ConfigError, match="the input is never overwritten"):
        main_generation.run(loaded(model, source, source))


def test_a_dry_run_prints_the_plan_and_writes_nothing(model, source, tmp_path, capsys):
    output = tmp_path / "out.parquet"
    main_generation.run(loaded(model, source, output, trainer_dry_run=True))
    printed = capsys.readouterr().out
    assert "responses  5 per prompt, at most 512 tokens, temperature 1, top_p 0.7" in printed
    assert "engines    native on 1 x 1 device(s), 128 prompts at a time" in printed
    assert list(tmp_path.iterdir()) == []


def test_an_engine_without_a_process_of_its_own_cannot_be_many():
    assert process_name("native") == "native_process"
    with pytest.raises(ConfigError, match=r"trainer.n_gpus_per_node=1"):
        process_name("hf")


def test_an_unknown_engine_is_refused_with_those_that_are_known(model, source, tmp_path):
    with pytest.raises(ConfigError, match=r"rollout.name is 'vlm'; known: .*vllm"):
        main_generation.run(loaded(model, source, tmp_path / "out.parquet", rollout_name="vlm"))


def test_engines_on_a_cpu_share_it():
    assert device_shares("cpu", 3, 1) == [(), (), ()]


def test_every_engine_gets_its_share_of_the_visible_devices(monkeypatch):
    monkeypatch.setitem(STAND_INS, "cuda", SimpleNamespace(device_count=lambda: 4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert device_shares("cuda", 2, 2) == [("4", "5"), ("6", "7")]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert device_shares("cuda", 3, 1) == [("0",), ("1",), ("2",)]
    with pytest.raises(ConfigError, match=r"need 8, and this machine has 4; .*n_gpus_per_node=4"):
        device_shares("cuda", 8, 1)


# ---- whole runs ----------------------------------------------------------------------------------


def test_hf_and_native_give_the_same_greedy_responses(model, source, tmp_path):
    options = {"n_samples": 1, "batch_size": NUM_ROWS, "rollout": {"temperature": 0.0}}
    found = []
    for name in ("native", "hf"):
        rollout = {**options["rollout"], "name": name}
        config = config_of(model, source, tmp_path / name, **{**options, "rollout": rollout})
        (engine,) = start_engines(config, model, num_batches=1, dtype="auto").rollouts
        found.append(generated(config, engine))
    assert found[0] == found[1]


def test_it_generates_in_a_notebook_whose_event_loop_waits_for_the_cell(model, source, tmp_path):
    config = config_of(model, source, tmp_path / "answers", n_samples=1)
    (engine,) = start_engines(config, model, num_batches=1, dtype="auto").rollouts

    async def cell():
        return generated(config, engine)

    assert len(asyncio.run(cell())) == NUM_ROWS


def command(model, source, output, *more):
    options = {
        "data.path": source,
        "data.output_path": output,
        "data.n_samples": 2,
        "data.batch_size": 1,
        "model.path": model,
        "rollout.prompt_length": 8,
        "rollout.response_length": 16,
        "trainer.n_gpus_per_node": 1,
        "trainer.device": "cpu",
        "hydra.run.dir": output.parent,
    }
    settings = [f"{key}={value}" for key, value in options.items()]
    return [sys.executable, "-m", "verl.trainer.main_generation", *settings, *more]


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_the_file_of_an_undisturbed_one(
    model, source, tmp_path, capsys
):
    output = tmp_path / "out.parquet"
    parts = tmp_path / "out.parquet.parts"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(model, source, output), env=environment)
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(list(parts.glob("*.parquet"))) < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=DEADLINE_SECONDS)
    num_kept = len(list(parts.glob("*.parquet")))
    assert 3 <= num_kept < NUM_ROWS
    assert not output.exists()

    def run(target):
        values = dict(word.split("=", 1) for word in command(model, source, target)[3:])
        values.pop("hydra.run.dir")
        nested = {}
        for key, value in values.items():
            section, _, name = key.partition(".")
            nested.setdefault(section, {})[name] = int(value) if value.isdigit() else value
        main_generation.run(load_config(nested, GenerationConfig))

    run(output)
    assert f"{num_kept} rows are in {parts} already" in capsys.readouterr().out
    run(tmp_path / "undisturbed.parquet")
    assert responses_of(output) == responses_of(tmp_path / "undisturbed.parquet")
    assert pq.read_table(output).num_rows == NUM_ROWS
    assert not parts.exists()
