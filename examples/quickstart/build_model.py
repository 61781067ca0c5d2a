"""A small Llama with random weights and a tokenizer that spells, as a Hugging Face folder.

    python examples/quickstart/build_model.py --out runs/quickstart/model --seed 0

0.67M parameters: enough for column arithmetic, small enough for a laptop. One token per byte, so
every digit is a token; four special tokens mark padding, the two speakers and the end.
"""

import argparse
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from verl.models.loading import random_causal_lm

PAD, USER, ASSISTANT, END = SPECIAL_TOKENS = ["<pad>", "<|user|>", "<|assistant|>", "</s>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message['role'] == 'user' %}}{{{{ '{USER}' + message['content'] }}}}"
    f"{{% else %}}{{{{ '{ASSISTANT}' + message['content'] + '{END}' }}}}{{% endif %}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{ASSISTANT}' }}}}{{% endif %}}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The special tokens, then the 256 bytes in the order of their printable stand-ins."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def build_config(vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.08,  # about 1/sqrt(hidden size); the usual 0.02 learns far slower here
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(END),
        tie_word_embeddings=False,
    )


def build(folder: Path, seed: int) -> int:
    """Write model and tokenizer; give the number of parameters."""
    tokenizer = build_tokenizer()
    model = random_causal_lm(build_config(len(tokenizer)), seed=seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the quickstart's model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    size = build(arguments.out, arguments.seed)
    print(f"{arguments.out}: a Llama of {size:,} parameters with random weights")
