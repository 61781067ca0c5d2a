"""Several ranks: the run is that of one, it ends when one of them dies, and rank 0 alone speaks."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.clusters import assert_given_back
from tests.trainer.sft_cases import (
    as_arguments,
    engine_options,
    engine_trainer,
    nested,
    options,
    trainer,
    weights,
    write_model,
)
from tests.utils.two_ranks import run_on_two_ranks
from verl.config.load import load_config
from verl.config.sft import SFTEngineConfig
from verl.trainer.sft_trainer_ray import train_on_ray
from verl.utils.environment import BadData


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


GENTLE = {"optim.lr": 1e-3}
"""Adam divides by the size of the gradient, which blows rounding up where that is nearly zero."""


def arrays(sft):
    return {name: value.numpy() for name, value in weights(sft).items()}


def assert_same(found, expected, atol=1e-6):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = abs(torch.as_tensor(found[name]) - torch.as_tensor(value)).max()
        assert difference <= atol, f"{name} differs by {difference}"


@pytest.mark.parametrize("ranks_per_row", [1, 2])
def test_two_ranks_train_as_one_does(model_folder, tmp_path, ranks_per_row):
    """Ranks that share rows hold the same ones: counts and losses of rows count once."""
    one = trainer(model_folder, tmp_path, **GENTLE, **{"data.val_max_samples": 63})
    first = one.train_step(1)
    one.train_step(2)
    expected, val_loss = arrays(one), one.mean_loss(one.val_dataset)

    def work(rank):
        changes = {**GENTLE, "data.micro_batch_size_per_gpu": 3, "data.val_max_samples": 63}
        changes["ulysses_sequence_parallel_size"] = ranks_per_row
        sft = trainer(model_folder, tmp_path, **changes)
        metrics = sft.train_step(1)
        sft.train_step(2)
        return metrics, arrays(sft), sft.mean_loss(sft.val_dataset)

    for metrics, found, found_val_loss in run_on_two_ranks(work, tmp_path):
        for name in ("loss", "grad_norm", "lr", "global_tokens", "trained_tokens"):
            assert metrics[f"train/{name}"] == pytest.approx(first[f"train/{name}"], rel=1e-5)
        assert found_val_loss == pytest.approx(val_loss, rel=1e-6)
        assert_same(found, expected)


def test_two_ranks_resume_bit_for_bit_and_one_rank_can_take_over(model_folder, tmp_path):
    changes = {"trainer.save_freq": 2}
    path = {"trainer.resume_from_path": str(tmp_path / "whole/checkpoints/global_step_2")}

    def whole(rank):
        sft = trainer(model_folder, tmp_path / "whole", **changes)
        sft.fit()
        return arrays(sft), sft.num_tokens

    def resumed(rank):
        sft = trainer(model_folder, tmp_path / "resumed", **changes, **path)
        sft.fit()
        return arrays(sft), sft.num_tokens

    for folder in ("whole", "resumed", "first", "second"):
        (tmp_path / folder).mkdir()
    options(model_folder, tmp_path / "whole")  # both ranks read the rows, neither writes them
    options(model_folder, tmp_path / "resumed")
    expected, num_tokens = run_on_two_ranks(whole, tmp_path / "first")[0]
    for found, tokens in run_on_two_ranks(resumed, tmp_path / "second"):
        assert tokens == num_tokens
        assert_same(found, expected, atol=0)
    alone = trainer(model_folder, tmp_path / "resumed", **changes, **path)
    alone.fit()
    assert_same(arrays(alone), expected)


def launched(module, values, folder, *, ranks=2, **environment):
    """Start a command under torchrun, as a process group of its own."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return subprocess.Popen(
        [sys.executable, "-m", *torchrun, "-m", module, *as_arguments(values)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_on_two_ranks_ends_where_one_process_does(model_folder, tmp_path):
    one = trainer(model_folder, tmp_path, **GENTLE)
    one.fit()
    values = options(model_folder, tmp_path / "two", **GENTLE, **{"trainer.logger": ["console"]})
    started = launched("verl.trainer.fsdp_sft_trainer", values, tmp_path)
    output, errors = started.communicate(timeout=280)
    assert started.returncode == 0, errors
    saved = load_file(tmp_path / "two/checkpoints/global_step_4/huggingface/model.safetensors")
    assert_same(saved, load_file(one.checkpoints.weights(4) / "model.safetensors"))
    assert output.count("step:4 - ") == output.count("COMMITTED step=4") == 1
    assert output.count("the model is in") == 1
    assert errors.count("each of the 2 ranks holds the whole model") == 1


FRAGILE = """
import os, signal, torch

class Fragile(torch.utils.data.Dataset):
    \"\"\"Rank 1 is killed when it asks for its ninth row, in the third step.\"\"\"

    def __init__(self, files, tokenizer, config, max_samples=-1):
        self.num_read = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.num_read += 1
        if os.environ["RANK"] == "1" and self.num_read > 8:
            os.kill(os.getpid(), signal.SIGKILL)
        ones = torch.ones(3, dtype=torch.long)
        return {"input_ids": 4 * ones, "position_ids": torch.arange(3), "loss_mask": ones}
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_rank_that_dies_ends_the_run(model_folder, tmp_path):
    (tmp_path / "fragile.py").write_text(FRAGILE)
    changes = {
        "data.custom_cls.path": str(tmp_path / "fragile.py"),
        "data.custom_cls.name": "Fragile",
        "data.val_files": [],
        "trainer.save_freq": 1,
        "trainer.total_training_steps": 1000,
    }
    started = launched(
        "verl.trainer.fsdp_sft_trainer", options(model_folder, tmp_path, **changes), tmp_path
    )
    _, errors = started.communicate(timeout=190)
    assert started.returncode != 0
    assert "Signal 9 (SIGKILL)" in errors
    committed = tmp_path / "checkpoints/latest_checkpointed_iteration.txt"
    assert committed.read_text() in ("1", "2")  # rows are read while the step before them trains


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_sigterm_saves_the_step_and_the_next_start_goes_on(model_folder, tmp_path):
    log_file = tmp_path / "metrics.jsonl"
    log = {"VERL_FILE_LOGGER_PATH": str(log_file)}
    changes = {"trainer.total_training_steps": 100000, "trainer.logger": ["file"]}
    values = options(model_folder, tmp_path, **changes)
    started = launched("verl.trainer.fsdp_sft_trainer", values, tmp_path, **log)
    give_up = time.monotonic() + 150
    while not log_file.exists():
        assert time.monotonic() < give_up
        time.sleep(0.1)
    started.send_signal(signal.SIGTERM)
    _, errors = started.communicate(timeout=40)
    steps = [json.loads(line)["step"] for line in log_file.read_text().splitlines()]
    saved = int((tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert saved == steps[-1] < 100000, errors
    again = trainer(model_folder, tmp_path, **{"trainer.total_training_steps": saved + 1})
    again.fit()
    assert (again.summary.first_step, again.summary.last_step) == (saved, saved + 1)


def on_ray(values, folder):
    return subprocess.run(
        [sys.executable, "-m", "verl.trainer.sft_trainer_ray", *as_arguments(values)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_bad_row_ends_a_run_on_ray_with_its_name(model_folder, tmp_path):
    done = on_ray(engine_options(model_folder, tmp_path, **{"data.max_length": 6}), tmp_path)
    assert done.returncode == 65, done.stderr
    message = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "conversations.parquet:1 has 7 tokens" in message


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(300)
def test_a_run_on_ray_gives_back_what_it_had_and_keeps_a_cluster_that_was_there(
    model_folder, tmp_path
):
    values = {"trainer.n_gpus_per_node": 2, "trainer.device": "cpu", "data.max_length": 6}
    loaded = load_config(nested(engine_options(model_folder, tmp_path, **values)), SFTEngineConfig)
    with pytest.raises(BadData, match=r"parquet:1 has 7 tokens"):
        train_on_ray(loaded)
    assert_given_back()


ON_ITS_OWN = """
import json
import sys

import ray

from verl.config.load import load_config
from verl.config.sft import SFTEngineConfig
from verl.trainer.sft_trainer_ray import train_on_ray
from verl.utils.environment import BadData

try:
    train_on_ray(load_config(json.loads(sys.argv[1]), SFTEngineConfig))
except BadData as error:
    print(f"{error} is_initialized: {ray.is_initialized()}")
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_that_fine_tuning_started_on_ray_ends_with_it(model_folder, tmp_path):
    values = nested(engine_options(model_folder, tmp_path, **{"data.max_length": 6}))
    done = subprocess.run(
        [sys.executable, "-c", ON_ITS_OWN, json.dumps(values, default=str)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert "has 7 tokens" in done.stdout, done.stderr[-3000:]
    assert done.stdout.strip().endswith("is_initialized: False")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ray_ends_where_one_process_does(model_folder, tmp_path):
    one = engine_trainer(model_folder, tmp_path, **GENTLE)
    one.fit()
    changes = {**GENTLE, "trainer.n_gpus_per_node": 2, "trainer.logger": ["console"]}
    values = engine_options(model_folder, tmp_path / "ray", **changes)
    done = on_ray(values, tmp_path)
    assert done.returncode == 0, done.stderr
    saved = load_file(tmp_path / "ray/checkpoints/global_step_4/huggingface/model.safetensors")
    assert_same(saved, load_file(one.checkpoints.weights(4) / "model.safetensors"))
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("the model is in")
    assert "each of the 2 ranks holds the whole model" in done.stderr
