"""A small Llama that knows the roles of a conversation with tools, and a tokenizer that spells.

`examples/search` and `examples/code_interpreter` say what is talked about.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from verl.models.loading import random_causal_lm

PAD, SYSTEM, USER, ASSISTANT, TOOL, END = SPECIAL_TOKENS = [
    *("<pad>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "</s>")
]
CHAT_TEMPLATE = (
    f"{{% if tools %}}{{{{ '{SYSTEM}' }}}}"
    "{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    f"{{% if message['role'] == 'assistant' %}}{{{{ '{END}' }}}}{{% endif %}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{ASSISTANT}' }}}}{{% endif %}}"
)


def build_tokenizer(phrases: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per byte, and one for each phrase that the conversations repeat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, TOOL],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def build_model(folder: Path, phrases: Sequence[str], seed: int) -> int:
    """Write model and tokenizer; give the number of parameters."""
    tokenizer = build_tokenizer(phrases)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.1,  # about 1/sqrt(hidden size)
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(END),
        tie_word_embeddings=True,
    )
    model = random_causal_lm(config, seed=seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def say(*turns: tuple[str, str]) -> list[dict[str, str]]:
    """Messages of (role, content)."""
    return [{"role": role, "content": content} for role, content in turns]


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)
