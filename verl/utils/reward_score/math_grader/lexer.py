"""From the text of an answer to tokens, and the words, numbers and units they are made of.

One regular expression finds the next token, so the time is linear. What belongs to typesetting
only (spacing, sizes, dollar signs, fonts) disappears here; a digit group such as 1,234 becomes one
number where the reading asked for allows it. Numbers (12, 0.5, 1.5e3, 0.1(6), 1011_2) are exact.
Units of measurement are compared by name: spellings of one unit are the same, none is converted.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from verl.utils.reward_score.math_grader.nodes import (
    MAX_TOKENS,
    Malformed,
    Number,
    TooLarge,
    UnknownCommand,
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
    text = text.translate(CHARACTERS)
    while position < len(text):
        match = _PATTERN.match(text, position)
        if match is None:
            unread = Unsupported if text[position].isalpha() else Malformed
            raise unread(f"{text[position]!r} has no meaning in an answer")
        kind, found = match.lastgroup or "", match.group()
        if kind == "commas" and (depth or not commas_group_digits):
            found = re.match(r"[0-9]+", found).group()  # pyright: ignore[reportOptionalMemberAccess]
            kind = "number"
        position += len(found)
        if kind == "space":
            follows_space = True
            continue
        previous = tokens[-1].kind if tokens else ""
        if kind == "text" and previous == "number" and found[-2] in UNITS and found[-3] in "{~ ":
            kind, found = "unit", found[-2]  # 5 \\text{m}
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
    if kind == "unit":
        return [Token("word", found)]
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
    if bare in FUNCTION_NAMES:
        return [Token("function", bare)]
    if content.casefold() in SEPARATORS or content == ",":
        return [Token(",", content)]
    if len(bare) == 1 and bare.isalpha():
        return [Token("symbol", bare)] if bare not in "ei" else [Token("constant", bare)]
    if bare.isdecimal() and bare.isascii():
        return [Token("number", bare)]
    return [Token("word", content)] if content.strip(".,;: ") else []


def _command_token(name: str) -> Token:
    if name in OPERATORS:
        return Token(OPERATORS[name], name)
    if name in FUNCTION_NAMES:
        return Token("function", name)
    if name in CONSTANTS and len(name) > 1:
        return Token("constant", CONSTANTS[name])
    if name in GREEK:
        return Token("symbol", name)
    raise UnknownCommand(name)


def _letter_tokens(letters: str) -> list[Token]:
    """A name, a word, or variables written side by side."""
    if letters in FUNCTION_NAMES:
        return [Token("function", letters)]
    if letters in CONSTANTS:
        return [Token("constant", CONSTANTS[letters])]
    if letters == "sqrt":
        return [Token("sqrt", letters)]
    if letters in SEPARATORS:
        return [Token(",", letters)]
    if len(letters) > 1 and _is_word(letters):
        return [Token("word", letters)]
    return [
        Token("constant", letter) if letter in "ei" else Token("symbol", letter)
        for letter in letters
    ]


def _is_word(letters: str) -> bool:
    lower = letters.lower()
    if lower in PLAIN_WORDS or letters in UNIT_WORDS:
        return True
    return len(letters) > 3 and not letters.isupper() and any(vowel in lower for vowel in "aeiou")


FUNCTION_NAMES = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan"}
    | {"sinh", "cosh", "tanh", "ln", "log", "lg", "exp"}
)

CONSTANTS = {
    "pi": "pi",
    "e": "e",
    "i": "i",
    "infty": "infinity",
    "infinity": "infinity",
    "oo": "infinity",
}

GREEK = frozenset(
    {"alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta",
     "iota", "kappa", "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi",
     "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Sigma", "Phi", "Psi",
     "Omega", "ell", "angle", "triangle"}
)  # fmt: skip

OPERATORS = {
    "frac": "frac", "dfrac": "frac", "tfrac": "frac", "cfrac": "frac",
    "sqrt": "sqrt", "binom": "binom", "dbinom": "binom", "tbinom": "binom",
    "times": "*", "cdot": "*", "ast": "*", "div": "/", "pm": "pm", "mp": "mp",
    "lt": "<", "gt": ">", "le": "<=", "leq": "<=", "leqslant": "<=",
    "ge": ">=", "geq": ">=", "geqslant": ">=", "ne": "!=", "neq": "!=",
    "approx": "~=", "simeq": "~=", "in": "in", "cup": "cup", "circ": "degree", "degree": "degree",
    "lfloor": "floor(", "rfloor": "floor)", "lceil": "ceil(", "rceil": "ceil)",
    "lvert": "|", "rvert": "|", "vert": "|", "lbrace": "\\{", "rbrace": "\\}",
    "lbrack": "[", "rbrack": "]", "langle": "(", "rangle": ")", "lparen": "(", "rparen": ")",
    "emptyset": "empty", "varnothing": "empty", "prime": "'", "colon": ":",
    "{": "\\{", "}": "\\}", "%": "%", "\\": "newline",
}  # fmt: skip
"""What a command means to the parser."""

CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ",
        "∙": "\\cdot ", "∗": "*", "÷": "/", "∕": "/", "√": "\\sqrt ", "π": "\\pi ",
        "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ",
        "±": "\\pm ", "∓": "\\mp ", "∪": "\\cup ", "∈": "\\in ", "∅": "\\emptyset ",
        "°": "^\\circ ", "′": "'", "²": "^2", "³": "^3", "½": "\\frac{1}{2}",
        "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "⅓": "\\frac{1}{3}", "⅔": "\\frac{2}{3}",
        "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ", "λ": "\\lambda ",
        "，": ",", "（": "(", "）": ")", "％": "%", "：": ":", "；": ";", "。": ".",
        "€": "\\$", "£": "\\$", "\u00a0": " ", "\u2009": " ", "\u200b": "",
    }
)  # fmt: skip

NUMBER_WORDS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16,
}  # fmt: skip
"""How a base may be spelled."""

PLAIN_WORDS = frozenset(
    {"yes", "no", "not", "odd", "all", "none", "one", "the", "is", "are", "for", "any", "if", "per"}
)
"""Words that would otherwise be read as products of their letters."""

APPROXIMATELY = frozenset({"about", "approximately", "approx", "roughly", "around"})
SEPARATORS = frozenset({"and", "or", ", and", ",and", "and,", ", or", "or,"})

NO_SOLUTION = frozenset(
    {"no solution", "no solutions", "no real solution", "no real solutions", "empty set"}
)
ALL_REALS = frozenset({"all real numbers", "all reals", "any real number"})

_UNIT_NAMES = """
cm centimeter centimetre
mm millimeter millimetre
m meter metre
km kilometer kilometre
in inch inche
ft foot feet
yd yard
mi mile
kg kilogram
g gram gm
mg milligram
lb pound lbs
oz ounce
ton tonne
s second sec
min minute
h hour hr
day
week
month
year yr
l liter litre L
ml milliliter millilitre mL
gal gallon
dollar USD usd buck
cent
percent percentage pct
mph
rad radian
K kelvin
Hz hertz
N newton
J joule
W watt
V volt
"""
UNITS = {
    spelling: spellings[0]
    for spellings in map(str.split, _UNIT_NAMES.strip().splitlines())
    for spelling in spellings
}
"""From every spelling (singular) to the unit. Units that differ here are different."""

EMPTY_UNITS = frozenset({"unit", "u", "number", ""})
"""Say nothing: 5 units are 5."""

UNIT_WORDS = frozenset(
    form for spelling in UNITS if len(spelling) > 1 for form in (spelling, spelling + "s")
)
"""Units that are recognised in plain text; a single letter is a variable there."""


MAX_EXPONENT = 2000


def number(text: str) -> Number:
    """A literal of the lexer. The repeating part of a decimal is in parentheses."""
    if text.isdecimal():
        return Number(Fraction(int(text)), digits=text)
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, decimals = mantissa.partition(".")
    decimals, _, repeating = decimals.rstrip(")").partition("(")
    value = Fraction(int(whole + decimals or "0"), 10 ** len(decimals))
    if repeating:
        value += Fraction(int(repeating), (10 ** len(repeating) - 1) * 10 ** len(decimals))
    if exponent:
        if abs(int(exponent)) > MAX_EXPONENT:
            raise TooLarge(f"{text[:40]} has an exponent beyond {MAX_EXPONENT}")
        value *= Fraction(10) ** int(exponent)
    return Number(value, decimals=len(decimals))


def based_number(text: str) -> Number:
    """1011_2, 1011_{2}, 1011_{\\text{two}}: digits with their base."""
    digits, _, spelled = text.partition("_")
    spelled = spelled.replace("\\text", "").strip("{}")
    base = int(spelled) if spelled.isdecimal() else NUMBER_WORDS.get(spelled, 0)
    if not 2 <= base <= 16:
        raise Malformed(f"{spelled!r} is no base between 2 and 16")
    if any(int(digit, 16) >= base for digit in digits):
        raise Malformed(f"{digits} has digits that base {base} does not have")
    return Number(Fraction(int(digits, base)), digits=digits, base=base)


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
