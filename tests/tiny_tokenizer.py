"""A tokenizer with one token per printable character, made for the tiny models."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import VOCABULARY, tiny_model

SPECIAL = ["<pad>", "<s>", "</s>"]
CHARACTERS = [chr(code) for code in range(33, 33 + VOCABULARY - len(SPECIAL))]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def save_tiny_model(folder: Path, model_type: str = "llama") -> Path:
    """A folder that looks like a downloaded model."""
    model = tiny_model(model_type)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
