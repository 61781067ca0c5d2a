import json
import logging

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_tokenizer import tiny_tokenizer
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.dataset.prompts import CHATML
from verl.utils.tokenizer import UNTIDY, backend_json, decode_texts, set_pad_token_id

WORDS = {"<unk>": 0, "<eos>": 1, "<end_of_turn>": 2, "<pad>": 3, "one": 4, "two": 5}


def word_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **special)


@pytest.fixture
def saved(tmp_path):
    def save(name: str = "model", **special: str) -> str:
        word_tokenizer(**special).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save


def test_a_missing_pad_token_is_replaced_and_reported(saved, caplog):
    path = saved(eos_token="<eos>")
    with caplog.at_level(logging.WARNING):
        tokenizer = hf_tokenizer(path)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<eos>", 1)
    assert "has no pad token; '<eos>' (id 1) is used" in caplog.text
    assert tokenizer("two one").input_ids == [5, 4]
    assert hf_tokenizer(path, correct_pad_token=False).pad_token is None


def test_a_pad_token_stays(saved, caplog):
    tokenizer = hf_tokenizer(saved(eos_token="<eos>", pad_token="<pad>"))
    assert tokenizer.pad_token_id == 3
    assert not caplog.records


def test_a_tokenizer_with_nothing_to_pad_with_is_refused():
    with pytest.raises(ValueError, match="neither a pad nor an end-of-sequence token"):
        set_pad_token_id(word_tokenizer())


def test_gemma_2_chat_models_stop_at_the_end_of_their_turn(saved):
    path = saved("gemma-2-2b-it", eos_token="<eos>")
    assert hf_tokenizer(path).eos_token_id == 2
    assert hf_tokenizer(path, correct_gemma2=False).eos_token_id == 1
    assert hf_tokenizer(saved("gemma-2-2b", eos_token="<eos>")).eos_token_id == 1


def test_options_reach_transformers(saved):
    assert hf_tokenizer(saved(eos_token="<eos>"), padding_side="left").padding_side == "left"


def test_a_text_model_has_no_processor(saved):
    assert hf_processor(saved(eos_token="<eos>")) is None


def test_a_broken_processor_is_an_error_not_none(saved, tmp_path):
    path = saved(eos_token="<eos>")
    config = {"processor_class": "Qwen2VLProcessor", "image_processor_type": "NoSuchProcessor"}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, OSError, TypeError, ImportError)):
        hf_processor(path)


def test_texts_are_decoded_as_the_tokenizer_does_it():
    tokenizer = tiny_tokenizer()
    ids = [[1, 5, 6, 2], [], [7, 0, 8]]
    assert decode_texts(tokenizer, ids) == tokenizer.batch_decode(ids, skip_special_tokens=True)


def test_a_tokenizer_with_a_decoder_of_its_own_is_asked():
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, token_ids, **kwargs):
            return super()._decode(token_ids, **kwargs).upper()

    tokenizer = Shouting(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    ids = [tokenizer.encode("abc", add_special_tokens=False)]
    assert decode_texts(tokenizer, ids)[0].replace(" ", "") == "ABC"
    assert backend_json(tokenizer) is None


def byte_tokenizer(**options):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def test_the_json_of_a_tokenizer_decodes_to_the_same_texts():
    for tokenizer in (
        tiny_tokenizer(),
        byte_tokenizer(),
        byte_tokenizer(clean_up_tokenization_spaces=True),  # does not clean: it is BPE
    ):
        backend = Tokenizer.from_str(backend_json(tokenizer))
        for ids in (tokenizer.encode(UNTIDY + " ü"), [0, 1, 2, 200], []):
            for skips in (True, False):
                expected = tokenizer.decode(ids, skip_special_tokens=skips)
                assert backend.decode(ids, skip_special_tokens=skips) == expected


def test_a_tokenizer_that_cleans_up_spaces_has_no_such_json():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer().backend_tokenizer, clean_up_tokenization_spaces=True
    )
    ids = tokenizer.encode(UNTIDY, add_special_tokens=False)
    assert tokenizer.decode(ids) != tokenizer.backend_tokenizer.decode(ids)
    assert backend_json(tokenizer) is None


BOMBS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "text": "{{ 'a' * 10 ** 12 }}",
    "some text": "{{ 'a' * 10 ** 7 }}",
    "width": "{{ '%9999999999d' % 1 }}",
    "filter": "{{ 'a' | center(9999999999) }}",
    "doubling": "{% set n = namespace(t='ab') %}{% for m in messages %}{% set n.t = n.t + n.t %}"
    "{% endfor %}{{ n.t }}",
    "laughs": "{% set n = namespace(t=['a']) %}{% for i in range(40) %}{% set n.t = [n.t, n.t] %}"
    "{% endfor %}{{ n.t | tojson }}",
    "with tools": "{% if tools %}{{ 'a' * 10 ** 12 }}{% endif %}",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_chat_template_without_end_is_refused_with_its_model(saved, kind):
    path = saved(eos_token="<eos>", chat_template=BOMBS[kind])
    with pytest.raises(ValueError, match=r"the chat template of .* (takes more than|writes \d+)"):
        hf_tokenizer(path)


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{{ raise_exception('only with images') }}",
        "{{ messages[7].content.nothing.there }}",
        "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') }}{{ tools | tojson }}",
        "{% for m in messages %}{{ m.content }}",
    ],
    ids=["chatml", "refuses", "undefined", "extensions", "syntax"],
)
def test_a_chat_template_that_ends_is_taken(saved, template):
    assert hf_tokenizer(saved(eos_token="<eos>", chat_template=template)).chat_template == template
