"""From the text of an answer to tokens.

One regular expression finds the next token, so the time is linear. What belongs to typesetting
only (spacing, sizes, dollar signs, fonts) disappears here; a digit group such as 1,234 becomes one
number where the reading asked for allows it.
"""

import re
from typing import NamedTuple

from verl.utils.reward_score.math_grader import vocabulary
from verl.utils.reward_score.math_grader.limits import (
    MAX_TOKENS,
    Malformed,
    TooLarge,
    Unsupported,
)


class Token(NamedTuple):
    """`kind` is number, based, symbol, constant, function, word, matrix, end or an operator."""

    kind: str
    text: str
    follows_space: bool = False


_PATTERN = re.compile(
    r"""
      (?P<space>  \s+ | ~ | \$ | \\[,;:!>\ $()\[\]]
                | \\(?:left|right|quad|qquad|displaystyle|textstyle|limits|[bB]ig{1,2}[lrm]?
                     |middle|nolimits|boxed|fbox)(?![A-Za-z])
                | \\[hv]space\*?\{[^{}]*\} )
    | (?P<repeating> [0-9]*\.[0-9]*\\overline\{[0-9]+\} )
    | (?P<based>  (?: [0-9][0-9A-F]{0,63} | [A-F][0-9A-F]{1,63}(?=_\{1[1-6]) )
                  _(?: \{[0-9]{1,2}\} | [0-9]{1,2}(?![0-9]) | \{?\\text\{[a-z]{3,8}\}\}? ) )
    | (?P<grouped> [0-9]{1,3}(?: (?: \{,\} | \\,\  | \\, | ,\\! | \\!, | \\\ ) [0-9]{3} )+
                  (?![0-9])(?:\.[0-9]+)? )
    | (?P<commas> [0-9]{1,3}(?: (?:,[0-9]{3})+ | (?:\ [0-9]{3})+ )(?![0-9]|[,\ ][0-9]|\ ?/)
                  (?:\.[0-9]+)? )
    | (?P<number> (?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,5}(?![0-9A-Za-z.]))? )
    | (?P<accent> \\(?:mathbb|vec|hat|bar|overline|tilde|widehat|overrightarrow|mathcal)
                  \s?\{\s?[A-Za-z0-9]{1,8}\s?\} )
    | (?P<text>   \\(?:text[a-z]{0,6}|math(?:rm|bf|it|sf)|mbox|operatorname\*?)\s?\{[^{}]*\} )
    | (?P<matrix> \\begin\{[pb]?(?:small)?matrix\} | \\begin\{array\}\{[^{}]*\} )
    | (?P<end>    \\end\{[A-Za-z]*\} )
    | (?P<command> \\(?:[A-Za-z]+|[{}%\\]) )
    | (?P<letters> [A-Za-z]+ )
    | (?P<operator> <= | >= | != | == | \*\* | [-+*/^_!()\[\]{}|,;:=<>%'&] )
    """,
    re.VERBOSE,
)
_SPELLED_ALIKE = {"==": "=", "**": "^", ";": ","}
_OPENS_LIST = ("(", "[", "\\{")


def tokenize(text: str, *, commas_group_digits: bool) -> list[Token]:
    """The tokens of an answer; with `commas_group_digits`, 1,234 outside brackets is a number."""
    tokens: list[Token] = []
    position = depth = 0
    follows_space = False
    text = text.translate(vocabulary.CHARACTERS)
    while position < len(text):
        match = _PATTERN.match(text, position)
        if match is None:
            raise Malformed(f"{text[position]!r} has no meaning in an answer")
        kind, found = match.lastgroup or "", match.group()
        if kind == "commas" and (depth or not commas_group_digits):
            found = re.match(r"[0-9]+", found).group()  # pyright: ignore[reportOptionalMemberAccess]
            kind = "number"
        position += len(found)
        if kind == "space":
            follows_space = True
            continue
        previous = tokens[-1].kind if tokens else ""
        for token in _tokens_of(kind, found):
            depth += _depth_change(token.kind, previous)
            tokens.append(token._replace(follows_space=True) if follows_space else token)
            follows_space = False
        if len(tokens) > MAX_TOKENS:
            raise TooLarge(f"the answer has more than {MAX_TOKENS} parts")
    return tokens


def _depth_change(kind: str, previous: str) -> int:
    """Inside brackets a comma separates; the braces of \\frac{1,234}{5} are not brackets."""
    if kind in _OPENS_LIST or (kind == "{" and previous == ""):
        return 1
    return -1 if kind in (")", "]", "\\}") else 0


def _tokens_of(kind: str, found: str) -> list[Token]:
    if kind in ("number", "based", "end", "matrix"):
        return [Token(kind, found)]
    if kind in ("grouped", "commas"):
        return [Token("number", re.sub(r"[^0-9.]", "", found))]
    if kind == "repeating":
        return [Token("number", found.replace("\\overline{", "(").replace("}", ")"))]
    if kind == "accent":
        return [Token("symbol", found.replace(" ", ""))]
    if kind == "text":
        return _text_tokens(found[found.index("{") + 1 : -1])
    if kind == "command":
        return [_command_token(found[1:])]
    if kind == "letters":
        return _letter_tokens(found)
    return [Token(_SPELLED_ALIKE.get(found, found), found)]


def _text_tokens(content: str) -> list[Token]:
    """What stands in \\text{...}: a letter, a number, a separator, or words."""
    content = content.strip()
    bare = content.strip("().: ")
    if bare in vocabulary.FUNCTION_NAMES:
        return [Token("function", bare)]
    if content.casefold() in vocabulary.SEPARATORS or content == ",":
        return [Token(",", content)]
    if len(bare) == 1 and bare.isalpha():
        return [Token("symbol", bare)] if bare not in "ei" else [Token("constant", bare)]
    if bare.isdecimal() and bare.isascii():
        return [Token("number", bare)]
    return [Token("word", content)] if content.strip(".,;: ") else []


def _command_token(name: str) -> Token:
    if name in vocabulary.OPERATORS:
        return Token(vocabulary.OPERATORS[name], name)
    if name in vocabulary.FUNCTION_NAMES:
        return Token("function", name)
    if name in vocabulary.CONSTANTS and len(name) > 1:
        return Token("constant", vocabulary.CONSTANTS[name])
    if name in vocabulary.GREEK:
        return Token("symbol", name)
    raise Unsupported(f"the command \\{name} is not known")


def _letter_tokens(letters: str) -> list[Token]:
    """A name, a word, or variables written side by side."""
    if letters in vocabulary.FUNCTION_NAMES:
        return [Token("function", letters)]
    if letters in vocabulary.CONSTANTS:
        return [Token("constant", vocabulary.CONSTANTS[letters])]
    if letters == "sqrt":
        return [Token("sqrt", letters)]
    if letters in vocabulary.SEPARATORS:
        return [Token(",", letters)]
    if len(letters) > 1 and _is_word(letters):
        return [Token("word", letters)]
    return [
        Token("constant", letter) if letter in "ei" else Token("symbol", letter)
        for letter in letters
    ]


def _is_word(letters: str) -> bool:
    lower = letters.lower()
    if lower in vocabulary.PLAIN_WORDS or letters in vocabulary.UNIT_WORDS:
        return True
    return len(letters) > 3 and not letters.isupper() and any(vowel in lower for vowel in "aeiou")
