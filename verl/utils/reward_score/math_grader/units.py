"""Units of measurement, compared by name: spellings of one unit are the same, none is converted."""

import re

from verl.utils.reward_score.math_grader.vocabulary import EMPTY_UNITS, UNITS

_POWERS = {"square": "^2", "squared": "^2", "sq": "^2", "cubic": "^3", "cubed": "^3", "cu": "^3"}


def canonical(text: str) -> str:
    """`square meters` and `m^2` give `m^2`; a unit that says nothing gives an empty string."""
    text = re.sub(r"[\\{}().,~*]|\bof\b", " ", text)
    parts = [_canonical_part(part) for part in re.split(r"\bper\b|/", text)]
    return "" if parts == [""] else "/".join(parts)


def is_known(unit: str) -> bool:
    return all(part.partition("^")[0] in UNITS.values() for part in unit.split("/"))


def _canonical_part(text: str) -> str:
    name, _, exponent = text.partition("^")
    words = name.split()
    power = "".join(_POWERS[word] for word in words if word in _POWERS)
    named = " ".join(_singular(word) for word in words if word not in _POWERS)
    if named in EMPTY_UNITS:
        return ""
    return UNITS.get(named, named.casefold()) + (power or ("^" + exponent.strip()) * bool(exponent))


def _singular(word: str) -> str:
    return word if word in UNITS or len(word) < 3 else word.removesuffix("s")
