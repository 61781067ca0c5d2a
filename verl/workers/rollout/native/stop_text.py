"""Where a response ends because its text does. The only place where the engine looks at text."""

from collections.abc import Callable, Sequence

CONTEXT_TOKENS = 8
"""Tokens decoded before the part that matters: a tokenizer may treat the first ones differently."""


def tokens_until_stop(
    token_ids: Sequence[int],
    num_new: int,
    stop: Sequence[str],
    decode_text: Callable[[list[int]], str],
) -> int | None:
    """How many tokens remain if the response ends with the first that completes one of the texts.

    None where none is complete. Only the last `num_new` tokens can complete one.
    """
    # A token is at least one byte, so a text that ends in a new token began within so many tokens.
    longest = max(len(text.encode()) for text in stop)
    first_end = len(token_ids) - num_new + 1
    start = max(0, first_end - longest - CONTEXT_TOKENS)

    def is_complete(end: int) -> bool:
        text = decode_text(list(token_ids[start:end]))
        return any(stop_text in text for stop_text in stop)

    if not is_complete(len(token_ids)):
        return None
    return next(end for end in range(first_end, len(token_ids) + 1) if is_complete(end))
