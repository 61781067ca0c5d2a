"""Fine-tuning adapters: what is trained, what a checkpoint holds, and what continues from it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import plain_twin
from tests.trainer.sft_cases import engine_trainer, trainer, weights, write_model
from tests.utils.two_ranks import run_on_two_ranks
from verl.models.lora import is_adapter, merged_copy

LORA = {"model.lora_rank": 4, "model.lora_alpha": 8, "model.target_modules": ["q_proj", "up_proj"]}
IDS = torch.tensor([[1, 40, 41, 42, 2]])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def step_folder(folder, step):
    return folder / f"checkpoints/global_step_{step}"


def test_adapters_learn_and_the_base_stays_as_it_was(model_folder, tmp_path):
    changes = {"trainer.total_training_steps": 20, "optim.lr": 0.05}
    sft = trainer(model_folder, tmp_path, **LORA, **changes)
    before = weights(sft)
    first = sft.train_step(1)["train/loss"]
    for step in range(2, 21):
        last = sft.train_step(step)["train/loss"]
    assert last < 0.97 * first
    after = weights(sft)
    for name, value in before.items():
        assert torch.equal(after[name], value) != is_adapter(name), name


def test_the_first_loss_is_that_of_the_base_model(model_folder, tmp_path):
    plain, lora = trainer(model_folder, tmp_path), trainer(model_folder, tmp_path, **LORA)
    expected = plain.train_step(1)["train/loss"]
    assert lora.train_step(1)["train/loss"] == pytest.approx(expected, rel=1e-6)


def test_the_last_checkpoint_has_the_adapter_and_the_merged_model(model_folder, tmp_path):
    from peft import PeftModel

    sft = trainer(model_folder, tmp_path, **LORA)
    sft.fit()
    expected = plain_twin(merged_copy(sft.engine.module))(IDS).logits
    merged = AutoModelForCausalLM.from_pretrained(sft.checkpoints.weights(4))
    torch.testing.assert_close(merged(IDS).logits, expected)
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    assert not torch.allclose(base(IDS).logits, expected)
    adapter = PeftModel.from_pretrained(base, str(step_folder(tmp_path, 4) / "lora_adapter"))
    torch.testing.assert_close(adapter(IDS).logits, expected)


@pytest.mark.parametrize("saves_all", [False, True])
def test_the_base_is_not_saved_with_every_step_unless_asked_for(model_folder, tmp_path, saves_all):
    contents = ["model", "optimizer", "extra", *(["hf_model"] if saves_all else [])]
    changes = {"trainer.save_freq": 2, "trainer.checkpoint.save_contents": contents}
    trainer(model_folder, tmp_path, **LORA, **changes).fit()
    has_weights = [
        (step_folder(tmp_path, step) / "huggingface/model.safetensors").exists() for step in (2, 4)
    ]
    assert has_weights == [saves_all, True]
    adapter = json.loads(
        (step_folder(tmp_path, 2) / "lora_adapter/adapter_config.json").read_text()
    )
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 8)
    assert adapter["base_model_name_or_path"] == str(model_folder)


def test_a_resumed_run_ends_bit_for_bit_where_an_uninterrupted_one_does(model_folder, tmp_path):
    changes = {**LORA, "trainer.save_freq": 2}
    whole = trainer(model_folder, tmp_path / "whole", **changes)
    whole.fit()
    path = str(step_folder(tmp_path / "whole", 2))
    resumed = trainer(
        model_folder, tmp_path / "resumed", **changes, **{"trainer.resume_from_path": path}
    )
    resumed.fit()
    assert resumed.summary.first_step == 2
    for name, value in weights(whole).items():
        assert torch.equal(weights(resumed)[name], value), name


def test_a_run_may_start_from_an_adapter(model_folder, tmp_path):
    first = engine_trainer(model_folder, tmp_path / "first", **LORA)
    first.fit()
    path = step_folder(tmp_path / "first", 4) / "lora_adapter"
    changes = {**LORA, "model.lora_adapter_path": str(path)}
    second = engine_trainer(model_folder, tmp_path / "second", **changes)
    for name, value in weights(first).items():
        assert torch.equal(weights(second)[name], value), name


def test_two_ranks_train_the_adapters_that_one_does(model_folder, tmp_path):
    changes = {**LORA, "optim.lr": 1e-3}
    one = trainer(model_folder, tmp_path, **changes)
    one.train_step(1)
    one.train_step(2)

    def work(rank):
        sft = trainer(model_folder, tmp_path, **changes)
        sft.train_step(1)
        sft.train_step(2)
        return {name: value.numpy() for name, value in weights(sft).items()}

    for found in run_on_two_ranks(work, tmp_path):
        for name, value in weights(one).items():
            assert abs(torch.tensor(found[name]) - value).max() <= 1e-6, name


def test_the_adapter_alone_can_be_taken_from_a_checkpoint(model_folder, tmp_path):
    first = trainer(model_folder, tmp_path, **LORA)
    first.fit()
    changes = {**LORA, "trainer.checkpoint.load_contents": ["model"]}
    second = trainer(model_folder, tmp_path, **changes)
    assert second.checkpoints.resume()[0] == 4
    for name, value in weights(first).items():
        assert torch.equal(weights(second)[name], value), name
    assert not second.engine.optimizer.optimizer.state  # moments start afresh
