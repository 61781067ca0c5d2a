"""Chat templates that differ in how a turn ends, tokenizers for them, and fuzzed conversations."""

import random
import re
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl.utils.dataset.prompts import CHATML

TRL = Path(__file__).parents[1] / "build/trl/trl/chat_templates"
"""Templates of real models, from the wheel of trl; `make templates` brings them."""

CALL = "{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
TEMPLATES = {
    "chatml": CHATML,
    "drops_thinking": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
        "{% else %}{{ m.content }}{% endif %}"
        "{% if m.tool_calls %}" + CALL + "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    ),
    "moves_the_end": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
    ),
    "ends_with_the_next": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
        "{% if m.tool_calls %}" + CALL + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "returns_last": (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% elif m.role == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "two_ends": (
        "{% for m in messages %}<|turn|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}<|say|>{{ m.content }}<|said|>{% else %}{{ m.content }}"
        "{% endif %}<|done|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n<|say|>{% endif %}"
    ),
    "plain": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
}
SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"{}]*[|｜]>|<(?:start|end)_of_\w+>|<\w+\|>|<\|\w+>|</s>|\[/?[A-Z_]+\]"
)
ENDS = re.compile(
    r"im_end|eot|<\|end\|>|end▁of▁sentence|<turn\|>|end_of_turn|END_OF_TURN|end_of_utt"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess a number.",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "description": "the number"}},
            "required": ["n"],
        },
    },
}


def trl_templates() -> dict[str, str]:
    return {file.stem: file.read_text() for file in sorted(TRL.glob("*.jinja"))}


@cache
def some_merges() -> str:
    """A tokenizer of bytes with merges, those of words with spaces and ends of lines among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words = ["the reply is\n\n too low.\n I think }}\n high. user assistant: "] * 4
    tokenizer.train_from_iterator([*words, *TEMPLATES.values()], trainer)
    return tokenizer.to_str()


@cache
def template_tokenizer(name: str, template: str) -> PreTrainedTokenizerFast:
    """Bytes, some merges, and the special tokens that the template writes."""
    tokenizer = Tokenizer.from_str(some_merges())
    special = sorted(set(SPECIAL.findall(template)))
    roles = ("<|user|>", "<|tool|>", "<|system|>") if "<|{{" in template else ()
    eos = next((token for token in special if ENDS.search(token)), "<eos>")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, bos_token="<bos>", pad_token="<pad>"
    )
    fast.add_special_tokens({"additional_special_tokens": [*special, *roles, "<|im_end|>"]})
    fast.chat_template = template
    fast.name_or_path = name
    return fast


def fuzzed_text(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> str:
    words = ["low", "high", " ", "\n", "x", "Zürich", '"', "{", "}", "7", "<b>", "\n\n", "."]
    words += [tokenizer.eos_token, "<|im_end|>", "<tool_call>"]
    return "w" + "".join(rng.choices(words, k=rng.randrange(8))) + "w"
