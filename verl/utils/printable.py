r"""Text from a model or a dataset, made safe to show.

Such text may hold anything: terminal escapes that rewrite what was printed, line breaks that forge
a log line, marks that reverse the direction of writing. Every such character is shown as its
escape (`\x1b`, `\n`, `\u202e`); everything else, all scripts and emoji included, stays as it is.
"""

import unicodedata

# Control, format (direction marks, zero width), surrogate, private use, line and paragraph breaks.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
# Joins emoji and letters of several scripts into one; it neither moves nor hides text.
_HARMLESS = {"\u200d"}


def printable(text: object, *, max_characters: int | None = None) -> str:
    """`text` on one line without control characters, cut to `max_characters` with a mark."""
    shown = "".join(map(_shown, str(text)))
    if max_characters is not None and len(shown) > max_characters:
        return shown[:max_characters] + f"... ({len(shown) - max_characters} more)"
    return shown


def _shown(character: str) -> str:
    if character in _HARMLESS or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")
