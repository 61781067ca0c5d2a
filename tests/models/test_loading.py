"""What loading a model promises about its weights."""

import pytest
from safetensors import safe_open

from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import save_tiny_model
from verl.models.loading import CACHE_LINE, load_causal_lm, load_value_model


@pytest.mark.parametrize("load", [load_causal_lm, load_value_model])
def test_weights_begin_at_cache_lines_wherever_they_stand_in_their_file(tmp_path, load):
    folder = save_tiny_model(tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert any(weight.data_ptr() % CACHE_LINE for weight in stored)  # or this test shows nothing
    assert all(weight.data_ptr() % CACHE_LINE == 0 for weight in load(str(folder)).parameters())


def test_a_tied_weight_stays_one(tmp_path):
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
