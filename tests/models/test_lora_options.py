"""What a configuration and a stored adapter say about adapters."""

import json
import math

import pytest
import torch

from tests.tiny_models import tiny_model
from verl.config.critic import FSDPCriticModelCfg
from verl.config.model import BaseModelConfig, HFModelConfig, LoraConfig
from verl.models.lora import LoraOptions, add_lora, lora_layers, lora_options, save_adapter


def adapted(model):
    return sorted({name.rpartition(".")[2] for name in lora_layers(model)})


def layers_for(**options):
    return adapted(add_lora(tiny_model("llama"), LoraOptions(rank=2, **options)))


def test_no_rank_and_no_path_mean_no_adapters():
    assert lora_options(HFModelConfig()) is None
    assert lora_options(HFModelConfig(lora_alpha=32, target_modules=["q_proj"])) is None
    assert lora_options(FSDPCriticModelCfg()) is None
    assert lora_options(BaseModelConfig()) is None


def test_either_rank_turns_adapters_on():
    assert lora_options(HFModelConfig(lora_rank=8)) == LoraOptions(rank=8)
    assert lora_options(HFModelConfig(lora=LoraConfig(rank=4))) == LoraOptions(rank=4)
    found = lora_options(FSDPCriticModelCfg(lora_rank=2, lora_alpha=4, target_modules="q_proj"))
    assert found == LoraOptions(rank=2, alpha=4, target_modules=["q_proj"])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("all-linear", "all-linear"),
        ("All-Linear", "all-linear"),
        ("q_proj", ["q_proj"]),
        ("q_proj,v_proj", ["q_proj", "v_proj"]),
        ("self_attn.q_proj, up_proj", ["self_attn.q_proj", "up_proj"]),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        (r".*\.(q|v)_proj", r".*\.(q|v)_proj"),
        (r".*layers\.[0-9]{1,2}\.mlp\..*", r".*layers\.[0-9]{1,2}\.mlp\..*"),
    ],
)
def test_layers_may_be_listed_in_a_text_or_described_by_a_pattern(written, meant):
    options = lora_options(HFModelConfig(lora_rank=1, target_modules=written))
    assert options is not None
    assert options.target_modules == meant
    assert (
        lora_options(HFModelConfig(lora_rank=1, exclude_modules=written)).exclude_modules == meant
    )


def test_targets_and_exclusions_choose_the_layers():
    linear = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert layers_for() == linear
    assert layers_for(target_modules=["q_proj", "v_proj"]) == ["q_proj", "v_proj"]
    assert layers_for(target_modules=r".*\.(q|k)_proj") == ["k_proj", "q_proj"]
    assert layers_for(exclude_modules=["q_proj", "o_proj"]) == sorted(
        {*linear} - {"q_proj", "o_proj"}
    )
    assert layers_for(exclude_modules=r".*mlp.*") == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_layers_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="qq_proj"):
        layers_for(target_modules=["qq_proj"])


def scale_of(model):
    (scale,) = {layer.scaling["default"] for layer in lora_layers(model).values()}
    return scale


def test_rank_stabilised_adapters_are_scaled_by_the_root_of_the_rank():
    options = lora_options(HFModelConfig(lora_rank=4, lora_alpha=8, use_rslora=True))
    assert scale_of(add_lora(tiny_model("llama"), options)) == 8 / math.sqrt(4)
    assert scale_of(add_lora(tiny_model("llama"), LoraOptions(rank=4, alpha=8))) == 8 / 4


# ---- adapters that are stored --------------------------------------------------------------------


def stored(folder, **changes):
    """A folder with an adapter of rank 4 on two kinds of layers; `changes` go into its config."""
    options = LoraOptions(rank=4, alpha=8, target_modules=["q_proj", "up_proj"], use_rslora=True)
    model = add_lora(tiny_model("llama"), options, seed=3)
    save_adapter(model, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return model


def started_from(folder, **options):
    options = LoraOptions(adapter_path=str(folder), **options)
    return add_lora(tiny_model("llama"), options, seed=9)


def test_a_stored_adapter_brings_its_own_form(tmp_path):
    model, found = stored(tmp_path), started_from(tmp_path)
    assert adapted(found) == ["q_proj", "up_proj"]
    assert scale_of(found) == 8 / math.sqrt(4)
    own = dict(model.named_parameters())
    assert all(torch.equal(p, own[name]) for name, p in found.named_parameters())
    assert [p.requires_grad for p in found.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]


def test_another_rank_than_the_stored_one_is_refused(tmp_path):
    stored(tmp_path)
    with pytest.raises(ValueError, match=r"lora_rank is 8, but the adapter in .* has rank 4"):
        started_from(tmp_path, rank=8)
    assert scale_of(started_from(tmp_path, rank=4)) == 8 / math.sqrt(4)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ],
)
def test_an_adapter_that_is_more_than_lora_is_refused(tmp_path, changes, complaint):
    stored(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"more than plain LoRA.*{complaint}.*merge it"):
        started_from(tmp_path)


def test_an_adapter_trained_with_dropout_continues_without(tmp_path, caplog):
    stored(tmp_path, lora_dropout=0.1)
    model = started_from(tmp_path)
    assert not [m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
    assert "was trained with dropout" in caplog.text


def test_a_folder_that_is_no_adapter_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"no adapter_config.json and no adapter_model.safetensors"
    ):
        started_from(tmp_path)
