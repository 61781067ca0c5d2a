"""A small copy of a model, with random weights and the model's tokenizer."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import init_random_model
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from verl.config.faults import ConfigError


def test_a_model_of_another_shape_is_written_with_its_tokenizer(tmp_path, capsys):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    changes = tmp_path / "new.json"
    changes.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    options = ["--hf_model_path", str(tmp_path / "model"), "--new_config_path", str(changes)]
    init_random_model.main([*options, "--output_path", str(tmp_path / "out")])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("1").input_ids
    changes.write_text(json.dumps({"num_hiden_layers": 1}))
    with pytest.raises(ConfigError, match="did you mean 'num_hidden_layers'"):
        init_random_model.main([*options, "--output_path", str(tmp_path / "out")])
