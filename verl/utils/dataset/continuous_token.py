"""A conversation as token ids that only grow: what was sampled is never rendered again.

    tokens = build_initial_tokens(tokenizer, messages)
    tokens = merge_assistant_tokens(tokens, sampled)
    tokens = merge_non_assistant_tokens(tokenizer, tokens, replies)
    tokens = merge_assistant_tokens(tokens, sampled_next)

The names are those of `verl.utils.tokenizer.continuous_token`. No page states their parameters:
they are those of an agent loop that has a tokenizer, messages, and the ids that an engine gave it.
`Continuation` says which ids follow a turn, and refuses templates for which that cannot be proven.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.continuation import continuation_of
from verl.utils.dataset.prompts import Message, encode_prompt

Segment = tuple[Sequence[int], Sequence[float] | None]
"""Ids that follow each other, and their log-probabilities; None where the model did not sample
them."""


def build_initial_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **template_kwargs: Any,
) -> list[int]:
    """The prompt as the chat template writes it, up to the beginning of the model's turn."""
    return encode_prompt(
        [dict(message) for message in messages],
        tokenizer,
        tools=tools,
        template_kwargs=template_kwargs,
    )


def merge_assistant_tokens(tokens: Sequence[int], turn_ids: Sequence[int]) -> list[int]:
    """`tokens` and the turn that the model sampled after them, as it was sampled."""
    return [*tokens, *turn_ids]


def merge_non_assistant_tokens(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[int],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **template_kwargs: Any,
) -> list[int]:
    """`tokens`, which end with a turn of the model, what others said then, and the beginning of the
    model's next turn. A turn that was cut before its end is ended first."""
    follow = continuation_of(tokenizer, tools=tools, template_kwargs=template_kwargs)
    return [*tokens, *follow.ids_after_turn(tokens, messages)]


def align_response_metadata(segments: Sequence[Segment]) -> dict[str, list[Any]]:
    """`response_ids`, `response_mask` and `response_logprobs` of all that follows the prompt.

    They are equally long: the mask is 1 at tokens that the model sampled, others have the
    log-probability 0.
    """
    aligned: dict[str, list[Any]] = {
        "response_ids": [],
        "response_mask": [],
        "response_logprobs": [],
    }
    for number, (ids, log_probs) in enumerate(segments):
        if log_probs is not None and len(log_probs) != len(ids):
            raise ValueError(
                f"segment {number} has {len(ids)} ids and {len(log_probs)} log-probabilities; a "
                "turn of the model has one for every id, any other segment has None"
            )
        aligned["response_ids"] += ids
        aligned["response_mask"] += [int(log_probs is not None)] * len(ids)
        aligned["response_logprobs"] += [0.0] * len(ids) if log_probs is None else log_probs
    return aligned
