"""Finding the answer in a response, in time linear in its length.

The answer is in the last box, \\boxed{...}; a response without one may say "answer: ..." or "the
answer is ...". Only searches for fixed strings and one bounded scan are used, no backtracking.
"""

import re

MAX_BOX_CHARACTERS = 10_000
"""A box that is not closed within this many characters holds no answer."""

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MARKERS = ("answer is", "answer:", "answer :")


def last_boxed(text: str) -> str | None:
    """The last \\boxed{...} or \\fbox{...}, command included; None if there is none, or it is open.

    Also the old form without braces, \\boxed 5, up to the next dollar sign or line.
    """
    start = text.rfind("\\boxed")
    if start < 0:
        start = text.rfind("\\fbox")
    if start < 0:
        return None
    window = text[start : start + MAX_BOX_CHARACTERS]
    opening = window.find("{")
    if opening < 0 or window[:opening].strip() not in ("\\boxed", "\\fbox"):
        bare = re.match(r"\\(?:boxed|fbox) ([^$\n]*)", window)
        return bare.group() if bare else None
    depth = 0
    for match in _BRACE.finditer(window, opening):
        depth += (match.group() == "{") - (match.group() == "}")
        if depth == 0:
            return window[: match.end()]
    return None


def unboxed(box: str) -> str:
    """What is inside a box that `last_boxed` returned."""
    command, brace, content = box.partition("{")
    if brace and command.strip() in ("\\boxed", "\\fbox") and content.endswith("}"):
        return content[:-1]
    for command in ("\\boxed ", "\\fbox "):
        if box.startswith(command):
            return box.removeprefix(command)
    raise ValueError(f"{box[:80]!r} is not a box; it should look like \\boxed{{...}}")


def final_answer(text: str) -> str | None:
    """The answer of a response: its last box, else the line after its last "answer is"."""
    box = last_boxed(text)
    if box is not None:
        return unboxed(box)
    if "\\boxed" in text:
        return None  # a box that was never closed: the response was cut off inside its answer
    lowered = text.lower()
    end = max(lowered.rfind(marker) + len(marker) * (marker in lowered) for marker in _MARKERS)
    if end < 1 or len(lowered) != len(text):
        return None
    line = text[end : end + MAX_BOX_CHARACTERS].lstrip().partition("\n")[0]
    return line.lstrip(": ").strip() or None
