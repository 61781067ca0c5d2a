"""An exported model is an ordinary Hugging Face model, and its weights come back bit for bit."""

import json
import os
import resource
import signal

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from tests.tiny_models import ARCHITECTURES, plain_twin, tiny_config, tiny_model
from verl.utils.checkpoint.hf_model import load_hf_weights, save_hf_description, save_hf_model
from verl.utils.checkpoint.layout import CheckpointCorruptError, CheckpointSaveError
from verl.utils.checkpoint.store import staged_step


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "hello": 3, "world": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return tokenizer


def logits(model):
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_the_export_loads_as_an_ordinary_model_with_the_same_weights_and_logits(
    tmp_path, model_type
):
    model = tiny_model(model_type)
    save_hf_model(model, None, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    torch.testing.assert_close(logits(loaded), logits(plain_twin(model)), rtol=0, atol=1e-6)


def test_the_config_names_no_attention_of_ours(tmp_path):
    model = tiny_model("llama")
    assert model.config._attn_implementation == "verl"
    save_hf_model(model, None, tmp_path / "with")
    save_hf_description(model, None, tmp_path / "without")
    for folder in ("with", "without"):
        text = (tmp_path / folder / "config.json").read_text()
        assert "verl" not in text
        assert "attn_implementation" not in text
    assert model.config._attn_implementation == "verl"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "with")
    assert plain.config._attn_implementation == "sdpa"
    assert not list((tmp_path / "without").glob("*.safetensors"))


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    model = tiny_model("qwen2")  # ties its embeddings
    save_hf_model(model, None, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_bfloat16_weights_keep_their_bits_and_dtype(tmp_path):
    model = tiny_model("llama").bfloat16()
    save_hf_model(model, None, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))


def test_the_tokenizer_travels_with_the_model(tmp_path):
    save_hf_model(tiny_model("llama"), tiny_tokenizer(), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("hello world")["input_ids"] == [3, 4]
    assert tokenizer.chat_template == tiny_tokenizer().chat_template


def test_generation_settings_that_transformers_refuses_to_save_are_saved_as_they_are(tmp_path):
    model = tiny_model("llama")
    model.generation_config.temperature = 0.6  # without do_sample, as some published models have
    save_hf_model(model, None, tmp_path)
    assert model.generation_config.temperature == 0.6
    assert json.loads((tmp_path / "generation_config.json").read_text())["temperature"] == 0.6
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.temperature == 0.6
    assert loaded.generation_config.eos_token_id == 2


def test_large_models_are_written_in_several_files(tmp_path):
    model = tiny_model("llama")
    save_hf_model(model, None, tmp_path, max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))


def test_a_value_model_is_exported_and_loaded_too(tmp_path):
    def build():
        return AutoModelForTokenClassification.from_config(tiny_config("qwen2", num_labels=1))

    model, other = build(), build()
    save_hf_model(model, None, tmp_path)
    load_hf_weights(other, tmp_path)
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_weights_are_loaded_in_place(tmp_path, model_type):
    model, other = tiny_model(model_type), tiny_model(model_type, scale=0.5)
    save_hf_model(model, None, tmp_path)
    before = [parameter.data_ptr() for parameter in other.parameters()]
    assert not torch.equal(logits(plain_twin(other)), logits(plain_twin(model)))
    load_hf_weights(other, tmp_path)
    assert [parameter.data_ptr() for parameter in other.parameters()] == before
    assert other.lm_head.weight is other.model.embed_tokens.weight or model_type != "qwen2"
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    assert other.config._attn_implementation == "verl"


def test_weights_of_another_shape_or_number_are_refused_by_name(tmp_path):
    save_hf_model(tiny_model("llama"), None, tmp_path)
    larger = tiny_model("llama", num_hidden_layers=3)
    with pytest.raises(CheckpointCorruptError, match=r"model\.layers\.2"):
        load_hf_weights(larger, tmp_path)


def test_pickled_weights_are_never_read(tmp_path):
    model = tiny_model("llama")
    save_hf_model(model, None, tmp_path)
    os.rename(tmp_path / "model.safetensors", tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        load_hf_weights(model, tmp_path)


def test_a_disk_that_refuses_the_weights_is_a_save_error_that_names_the_place(tmp_path):
    """A real refusal, not an injected one: files may not grow beyond 4 kB."""
    model = tiny_model("llama")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with (
            pytest.raises(CheckpointSaveError, match=r"huggingface.*EFBIG"),
            staged_step(tmp_path, 1, fingerprint={}) as folder,
        ):
            save_hf_model(model, None, folder / "actor" / "huggingface")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []
