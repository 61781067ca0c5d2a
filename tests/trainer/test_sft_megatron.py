"""Fine-tuning on megatron-core: the curve of one device, whatever the layout and who goes on."""

import re
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.sft_cases import (
    as_arguments,
    engine_options,
    engine_trainer,
    nested,
    write_model,
)
from tests.trainer.test_sft_ranks import launched
from tests.utils.two_ranks import run_on_two_ranks
from tests.workers.engine.megatron import conftest
from verl.config.faults import ConfigError
from verl.config.load import load_config
from verl.config.sft import SFTEngineConfig
from verl.trainer import sft_trainer

one_rank = conftest.one_rank
MEGATRON = {"engine.strategy": "megatron"}
SMALL = {"data.use_dynamic_bsz": False, "data.micro_batch_size_per_gpu": 3, "optim.lr": 1e-3}
"""Adam divides by the size of the gradient, which blows rounding up where that is nearly zero."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def curve(sft, first=1):
    """Loss, norm and rate of each step, then the loss of held-out rows."""
    metrics = [sft.train_step(step) for step in range(first, 5)]
    names = ("train/loss", "train/grad_norm", "train/lr", "train/trained_tokens")
    return [one[name] for one in metrics for name in names] + [sft.mean_loss(sft.val_dataset)]


def saved(folder, step=4):
    return load_file(folder / f"checkpoints/global_step_{step}/huggingface/model.safetensors")


def assert_close(found, expected, atol=1e-6):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=atol)


def test_one_rank_has_the_curve_of_one_device_and_each_continues_the_other(
    model_folder, tmp_path, one_rank
):
    options = {**SMALL, "trainer.save_freq": 2, "data.val_max_samples": 9}
    expected = curve(engine_trainer(model_folder, tmp_path / "curve", **options))
    found = curve(engine_trainer(model_folder, tmp_path / "curve", **options, **MEGATRON))
    assert found == pytest.approx(expected, rel=1e-5)
    engine_trainer(model_folder, tmp_path / "device", **options).fit()
    engine_trainer(model_folder, tmp_path / "megatron", **options, **MEGATRON).fit()
    whole = saved(tmp_path / "device")
    assert_close(saved(tmp_path / "megatron"), whole)
    for writer, back_end in ("megatron", {}), ("device", MEGATRON), ("megatron", MEGATRON):
        source = tmp_path / writer / "checkpoints/global_step_2"
        resume = {
            "trainer.resume_from_path": str(source),
            "trainer.resume_mode": "resume_path",
            "trainer.resume_may_change": ["engine.*", "optim.*"],
        }
        folder = tmp_path / f"{writer} to {len(back_end)}"
        sft = engine_trainer(model_folder, folder, **options, **resume, **back_end)
        sft.fit()
        assert sft.summary.first_step == 2
        assert_close(saved(folder), whole)
        if writer == "megatron" and back_end:
            assert_close(saved(folder), saved(tmp_path / "megatron"), atol=0)


REFUSED = [
    ("engine.tensor_model_parallel_size", 2, r"1 \* 1 = 2\) must divide the 1 ranks of the role"),
    ("engine.expert_model_parallel_size", 2, "must divide the 1 ranks"),
    ("engine.use_dist_checkpointing", True, "dist_checkpointing_path is null"),
    ("engine.forward_only", True, "fine-tuning needs an optimizer"),
    ("model.lora_rank", 4, "megatron-core has no adapters"),
    ("model.lora.rank", 4, "megatron-core has no adapters"),
    ("model.enable_activation_offload", True, "activations stay on the device"),
    ("data.max_token_len_per_gpu", 15, "it must be at least that"),
]


@pytest.mark.parametrize(("key", "value", "complaint"), REFUSED)
def test_what_it_cannot_honour_is_refused_by_name(model_folder, tmp_path, key, value, complaint):
    values = nested(engine_options(model_folder, tmp_path, **MEGATRON, **{key: value}))
    with pytest.raises(ConfigError, match=complaint):
        sft_trainer.run_sft(load_config(values, SFTEngineConfig).checked())


def test_a_layout_that_does_not_divide_the_model_is_refused_with_the_nearest(
    model_folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    sizes = {"engine.tensor_model_parallel_size": 4}
    values = nested(engine_options(model_folder, tmp_path, **MEGATRON, **sizes))
    with pytest.raises(ConfigError, match=r"engine: tensor_model.*\(4\) must divide the .* heads"):
        sft_trainer.run_sft(load_config(values, SFTEngineConfig).checked())


def test_the_command_says_what_has_no_effect_and_plans_the_layout(
    model_folder, tmp_path, monkeypatch, capsys
):
    values = engine_options(model_folder, tmp_path)
    values |= {
        "engine.use_mbridge": False,
        "trainer.dry_run": True,
        "optim.lr_decay_style": "linear",
    }
    arguments = ["engine=megatron", "optim=megatron", *as_arguments(values)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sft", *arguments])
    sft_trainer.main()
    output, notes = capsys.readouterr()
    assert re.search("ranks +1 ranks divide the model: tensor 1, pipeline 1", output), output
    assert "lr 0.01, linear" in output
    assert notes.count("has no effect here") == 1
    assert "engine.use_mbridge has no effect here" in notes


LAYOUTS = {
    "data": {},
    "tensor": {"engine.tensor_model_parallel_size": 2},
    "pipeline": {"engine.pipeline_model_parallel_size": 2},
    "context": {"engine.context_parallel_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_have_the_curve_of_one_device(model_folder, tmp_path, name):
    """Of 9 held-out rows one data rank has 5, and the other a batch less."""
    options = {**SMALL, "data.val_max_samples": 9, "data.train_batch_size": 4}
    expected = curve(engine_trainer(model_folder, tmp_path, **options))

    def work(rank):
        return curve(engine_trainer(model_folder, tmp_path, **options, **MEGATRON, **LAYOUTS[name]))

    for found in run_on_two_ranks(work, tmp_path):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_goes_on_bit_for_bit_on_its_layout_and_to_rounding_on_others(model_folder, tmp_path):
    options = {**SMALL, **MEGATRON, "trainer.save_freq": 2}
    resume = {
        "trainer.resume_from_path": str(tmp_path / "whole/checkpoints/global_step_2"),
        "trainer.resume_mode": "resume_path",
    }

    def fit(folder, layout, **changes):
        engine_options(model_folder, tmp_path / folder)  # both ranks read the rows
        (tmp_path / f"{folder} ranks").mkdir()

        def work(rank):
            engine_trainer(
                model_folder, tmp_path / folder, **options, **changes, **LAYOUTS[layout]
            ).fit()

        run_on_two_ranks(work, tmp_path / f"{folder} ranks")
        return saved(tmp_path / folder)

    whole = fit("whole", "tensor")
    assert not (tmp_path / "whole/checkpoints/global_step_2/huggingface/model.safetensors").exists()
    assert_close(fit("same", "tensor", **resume), whole, atol=0)
    for layout in ("pipeline", "data"):
        assert_close(fit(layout, layout, **resume), whole)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_trains_and_leaves_a_model(model_folder, tmp_path):
    engine_trainer(model_folder, tmp_path / "one", **SMALL).fit()
    values = engine_options(model_folder, tmp_path / "two", **SMALL, **LAYOUTS["tensor"])
    values |= {"trainer.logger": ["console"], "engine": "megatron", "optim": "megatron"}
    started = launched("verl.trainer.sft_trainer", values, tmp_path)
    output, errors = started.communicate(timeout=280)
    assert started.returncode == 0, errors
    assert_close(saved(tmp_path / "two"), saved(tmp_path / "one"))
    assert output.count("COMMITTED step=4") == output.count("the model is in") == 1
    assert "2 ranks divide the model: tensor 2" in errors


@pytest.mark.slow
def test_what_the_disk_refuses_to_one_rank_undoes_the_step_of_all(model_folder, tmp_path):
    def work(rank):
        sft = engine_trainer(model_folder, tmp_path, **SMALL, **MEGATRON, **LAYOUTS["tensor"])
        sft.train_step(1)
        sft.checkpoints.save(1, num_tokens=1, is_last=False)
        manager, capture = sft.checkpoints.manager, sft.checkpoints.manager.capture
        manager.capture = lambda keep: [*capture(keep), *([refuse] if rank == 1 else [])]
        refusal = sft._save_if_possible(2, is_last=False)
        sft.ranks.meet()
        return None if refusal is None else str(refusal)

    first, second = run_on_two_ranks(work, tmp_path)
    assert "another rank could not write its part" in first
    assert second is None
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("global_step_*")) == [
        "global_step_1"
    ]


def refuse(folder):
    raise OSError(28, "No space left on device")
