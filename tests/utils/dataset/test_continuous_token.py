"""Ids of a conversation are appended: what was sampled stays, what follows is the template's."""

import pytest

from tests.templates import TEMPLATES, template_tokenizer
from verl.utils.dataset.prompts import render
from verl.utils.tokenizer.continuous_token import (
    align_response_metadata,
    build_initial_tokens,
    merge_assistant_tokens,
    merge_non_assistant_tokens,
)

ASK = [{"role": "user", "content": "1+1="}]
REPLY = [{"role": "user", "content": "again"}]


def encoded(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_conversation_grows_as_the_template_writes_it():
    tokenizer = template_tokenizer("chatml", TEMPLATES["chatml"])
    tokens = build_initial_tokens(tokenizer, ASK)
    assert tokens == encoded(tokenizer, render(ASK, tokenizer, add_generation_prompt=True))
    said = [*encoded(tokenizer, "2"), tokenizer.eos_token_id]
    after = merge_non_assistant_tokens(tokenizer, merge_assistant_tokens(tokens, said), REPLY)
    history = [*ASK, {"role": "assistant", "content": "2"}, *REPLY]
    assert after == encoded(tokenizer, render(history, tokenizer, add_generation_prompt=True))
    assert after[: len(tokens) + len(said)] == [*tokens, *said]


def test_a_turn_that_was_cut_is_ended_first():
    tokenizer = template_tokenizer("chatml", TEMPLATES["chatml"])
    tokens = merge_assistant_tokens(build_initial_tokens(tokenizer, ASK), encoded(tokenizer, "2"))
    ended = merge_assistant_tokens(tokens, [tokenizer.eos_token_id])
    assert merge_non_assistant_tokens(tokenizer, tokens, REPLY) == merge_non_assistant_tokens(
        tokenizer, ended, REPLY
    )


def test_masks_and_log_probs_follow_the_ids():
    assert align_response_metadata([([5, 6], [-0.5, -0.25]), ([7], None), ([8], [-1.0])]) == {
        "response_ids": [5, 6, 7, 8],
        "response_mask": [1, 1, 0, 1],
        "response_logprobs": [-0.5, -0.25, 0.0, -1.0],
    }
    with pytest.raises(ValueError, match="segment 1 has 2 ids and 1 log-probabilities"):
        align_response_metadata([([5], None), ([6, 7], [-1.0])])
