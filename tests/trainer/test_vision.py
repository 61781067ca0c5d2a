"""Runs with images through `main_ppo`, the fine-tuning command and the generation command."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.tiny_vision import picture, save_tiny_vision
from tests.toy import ACTOR, ROLLOUT, make_toy, toy_run, weights
from verl.config.generation import GenerationConfig
from verl.config.load import load_config
from verl.trainer import sft_trainer
from verl.trainer.generation.engines import engine_here
from verl.trainer.generation.run import generate
from verl.utils.images import as_png
from verl.utils.media import MEDIA
from verl.utils.tokenizer import hf_processor

SHORT = ("data.max_prompt_length=100", "trainer.total_training_steps=1")


def seeing_toy(folder, *, family="qwen2_vl", with_text=False):
    """The toy task with a picture in its prompts; with `with_text` in every other one."""
    make_toy(folder)
    shutil.rmtree(folder / "model")
    save_tiny_vision(folder / "model", family)
    rows = []
    for number in range(8):
        has_image = not (with_text and number % 2)
        file = folder / f"{number}.png"
        picture(number).save(file)
        content = f"{'<image>' if has_image else ''}say {number}"
        rows.append(
            {
                "prompt": [{"role": "user", "content": content}],
                "images": [str(file)] if has_image else [],
                "data_source": "sevens",
                "answer": "7",
                "extra_info": {"index": number},
            }
        )
    for name in ("train", "val"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return seeing_toy(tmp_path_factory.mktemp("toy"))


def test_a_run_with_images_trains_on_what_it_generated(toy, tmp_path):
    """Exact mode: the log-probs of the rollout are those of the update, bit for bit."""
    (line,), trainer = toy_run(
        toy,
        tmp_path,
        *SHORT,
        f"{ROLLOUT}.exact=true",
        f"{ACTOR}.freeze_vision_tower=true",
        f"custom_reward_function.path={toy / 'parity.py'}",
        "trainer.save_freq=1",
    )
    assert line["actor/old_log_prob_error"] == 0.0
    assert line["actor/grad_norm"] > 0
    assert trainer.batch.batch["position_ids"].shape[1] == 3
    assert len(trainer.batch.non_tensor_batch[MEDIA][0]) == 1
    start = save_tiny_vision(tmp_path / "start")
    folder = tmp_path / "checkpoints" / "global_step_1" / "actor" / "huggingface"
    before, after = (pa_weights(one) for one in (start, folder))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any("visual" in name for name in changed)
    processor = hf_processor(folder)
    assert processor.image_processor.patch_size == 4


def pa_weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "idefics3"])
def test_every_family_runs(tmp_path, family):
    toy = seeing_toy(tmp_path / "toy", family=family)
    (line,), _ = toy_run(toy, tmp_path, *SHORT, f"custom_reward_function.path={toy / 'parity.py'}")
    assert line["training/rollout_probs_diff_max"] < 1e-5
    assert line["actor/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero1", "full"])
def test_ranks_give_the_gradient_of_one_also_where_some_rows_have_no_image(tmp_path, sharding):
    toy = seeing_toy(tmp_path / "toy", with_text=True)
    changes = [
        "data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2", "data.shuffle=false",
        f"custom_reward_function.path={toy / 'parity.py'}", "trainer.controller=local", *SHORT,
        f"{ACTOR}.fsdp_config.sharding={sharding}", "trainer.total_training_steps=2",
    ]  # fmt: skip
    norms = []
    for ranks in (1, 2):
        output = tmp_path / f"ranks{ranks}"
        lines, _ = toy_run(toy, output, *changes, f"trainer.n_gpus_per_node={ranks}")
        norms.append([line["actor/grad_norm"] for line in lines])
    assert norms[0][0] > 0
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.slow
def test_a_killed_run_with_images_goes_on_as_if_it_had_not_been(toy, tmp_path):
    changes = [
        "data.max_prompt_length=100",
        "trainer.total_training_steps=3",
        f"custom_reward_function.path={toy / 'parity.py'}",
    ]
    straight, whole = toy_run(toy, tmp_path / "a", *changes)
    output = tmp_path / "b"
    output.mkdir()
    saves = [*changes, "trainer.save_freq=1"]
    script = (
        "import sys, pathlib\n"
        "from tests.toy import toy_run\n"
        "toy, output, *changes = sys.argv[1:]\n"
        "toy_run(pathlib.Path(toy), pathlib.Path(output), *changes)\n"
    )
    command = [sys.executable, "-c", script, str(toy), str(output), *saves]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "COMMITTED step=2" in line:
                os.kill(process.pid, signal.SIGKILL)
                break
        assert process.wait(60) == -signal.SIGKILL
    (last,), resumed = toy_run(toy, output, *saves)
    assert last["step"] == 3
    assert last["critic/score/mean"] == straight[2]["critic/score/mean"]
    found = weights(resumed)
    for name, value in weights(whole).items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
def test_adapters_train_on_the_language_part(toy, tmp_path):
    pytest.importorskip("peft")
    (line,), trainer = toy_run(
        toy,
        tmp_path,
        *SHORT,
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.target_modules=all-linear",
        f"custom_reward_function.path={toy / 'parity.py'}",
    )
    assert line["actor/grad_norm"] > 0
    adapters = [name for name in weights(trainer) if ".lora_" in name]
    assert adapters
    assert all("language_model" in name for name in adapters)


def image_rows(num_rows, **columns):
    return [
        {
            "prompt": [{"role": "user", "content": "<image>What?"}],
            "messages": [
                {"role": "user", "content": "<image>What?"},
                {"role": "assistant", "content": "77"},
            ],
            "images": [{"bytes": as_png(picture(number)), "path": None}],
            **columns,
        }
        for number in range(num_rows)
    ]


def test_conversations_with_images_are_fine_tuned(toy, tmp_path, monkeypatch):
    pq.write_table(pa.Table.from_pylist(image_rows(8)), tmp_path / "a.parquet")
    options = {
        "data.train_files": tmp_path / "a.parquet",
        "data.train_batch_size": 4,
        "data.max_length": 64,
        "model.path": toy / "model",
        "optim.lr": 0.01,
        "trainer.total_training_steps": 6,
        "trainer.default_local_dir": tmp_path / "sft",
        "trainer.n_gpus_per_node": 1,
        "trainer.device": "cpu",
        "trainer.logger": "[file]",
        "hydra.run.dir": tmp_path / "hydra",
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    arguments = [f"{name}={value}" for name, value in options.items()]
    monkeypatch.setattr(sys, "argv", ["verl", *arguments])
    sft_trainer.main()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    losses = [json.loads(line)["data"]["train/loss"] for line in lines]
    assert losses[-1] < 0.7 * losses[0]
    assert (tmp_path / "sft/global_step_6/huggingface/preprocessor_config.json").exists()


def test_the_generation_command_answers_prompts_with_images(toy, tmp_path):
    broken = {"bytes": b"no image", "path": None}
    rows = [*image_rows(110), {**image_rows(1)[0], "images": [broken]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = {"path": str(tmp_path / "a.parquet"), "output_path": str(tmp_path / "b.parquet")}
    values = {
        "data": {**data, "n_samples": 1, "batch_size": 64},
        "model": {"path": str(toy / "model")},
        "rollout": {"prompt_length": 100, "response_length": 6, "top_k": -1, "top_p": 1.0},
        "trainer": {"n_gpus_per_node": 1, "device": "cpu"},
    }
    config = load_config(values, GenerationConfig).checked()
    generate(config, lambda path, _: engine_here(config, path, "cpu", "float32"))
    answers = pq.read_table(tmp_path / "b.parquet")["responses"].to_pylist()
    assert [len(one or ()) for one in answers] == [1] * 110 + [0]
    assert len({text for one in answers[:110] for text in one}) > 100


def test_rows_of_geometry3k_reach_the_plan(toy, tmp_path, capsys):
    row = {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": "<image>Find x. Think first."}],
        "images": [{"bytes": as_png(picture(1)), "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"split": "train", "index": 0, "answer": "7", "question": "<image>Find x."},
    }
    pq.write_table(pa.Table.from_pylist([row] * 4), tmp_path / "geo3k.parquet")
    files = [f"data.{name}_files={tmp_path / 'geo3k.parquet'}" for name in ("train", "val")]
    toy_run(toy, tmp_path, *SHORT, *files, "trainer.dry_run=true")
    assert re.search(r"rows +4\n", capsys.readouterr().out)
