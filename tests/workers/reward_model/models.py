"""Tiny reward models, and tokenizers that turn text into tokens and back."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.tiny_models import VOCABULARY, tiny_config

SPECIAL = ["<pad>", "<s>", "</s>", "<turn>", "</turn>"]
LETTERS = [chr(code) for code in range(32, 32 + VOCABULARY - len(SPECIAL))]
TEMPLATE = (
    "<s>{% for m in messages %}<turn>{{ m['role'][0] + ':' + m['content'] }}</turn>{% endfor %}"
)


def character_tokenizer(
    *, first: str = " ", template: str | None = None
) -> PreTrainedTokenizerFast:
    """One token per character; `first` is where the alphabet begins, so that ids may differ."""
    start = LETTERS.index(first)
    letters = LETTERS[start:] + LETTERS[:start]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def reward_model(model_type: str, *, kind: str = "sequence", num_labels: int = 1) -> Any:
    """An unmodified transformers classifier with weights large enough to make a difference."""
    auto: Any = (
        AutoModelForSequenceClassification
        if kind == "sequence"
        else AutoModelForTokenClassification
    )
    config = tiny_config(model_type, num_labels=num_labels)
    model: PreTrainedModel = auto.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 or parameter.shape == (1,):
                parameter.normal_(0.0, 0.2, generator=generator)
    return model.eval()


def save(model: Any, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> str:
    model.save_pretrained(folder)
    (tokenizer or character_tokenizer()).save_pretrained(folder)
    return str(folder)
