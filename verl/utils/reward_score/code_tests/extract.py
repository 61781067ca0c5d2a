"""The program in a response: its last ```python block, else its first fenced block."""

_FENCE = "```"


def extract_code(completion: str) -> str | None:
    """None where there is no block. A block that was cut off goes to the end of the text."""
    _, marker, rest = completion.rpartition(_FENCE + "python")
    if not marker:
        _, marker, rest = completion.partition(_FENCE)
        if not marker:
            return None
        language, newline, body = rest.partition("\n")
        rest = body if newline and _FENCE not in language else rest
    return rest.partition(_FENCE)[0].strip("\n")
