"""A model that is made, not learnt: it says one of a few phrases, each a token of its own, and ends
the turn. So it calls tools from the first step of training on."""

import json
from pathlib import Path

from transformers import LlamaConfig

from verl.models.loading import random_causal_lm
from verl.utils.import_utils import load_module

TINY_AGENT = Path(__file__).parents[1] / "examples" / "tiny_agent" / "tiny_agent.py"


def tool_call(name, **arguments):
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


def speaking_model(folder, phrases):
    """A Llama that begins a turn with each of the phrases about as often, and ends it after one.

    Attention moves its log-probabilities a little: they tell one context from another.
    """
    tiny = load_module(str(TINY_AGENT))
    tokenizer = tiny.build_tokenizer(phrases)
    tokenizer.model_max_length = 4096
    start, end, *spoken = tokenizer.convert_tokens_to_ids([tiny.ASSISTANT, tiny.END, *phrases])
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=4096,
        pad_token_id=0, bos_token_id=None, eos_token_id=end, tie_word_embeddings=False,
    )  # fmt: skip
    model = random_causal_lm(config, seed=0)
    states = model.get_parameter("model.embed_tokens.weight").data.normal_()
    head = model.get_parameter("lm_head.weight").data.zero_()
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(0.5)
    head[spoken] = 0.2 * states[start]
    head[end] = 0.2 * states[spoken].sum(0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
