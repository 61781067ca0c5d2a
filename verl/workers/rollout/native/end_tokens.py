"""Which tokens end a response."""

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def end_tokens(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a response: the model's, its generation config's, the tokenizer's."""
    ids: set[int] = set()
    stated: list[Any] = [tokenizer.eos_token_id, module.config.get_text_config().eos_token_id]
    if module.generation_config is not None:
        stated.append(module.generation_config.eos_token_id)
    for value in stated:
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return sorted(ids)
