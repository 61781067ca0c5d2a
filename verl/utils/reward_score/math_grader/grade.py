"""`grade`: is this answer the gold answer? And `final_answer`: which is the answer in a response.

Plain numbers are compared at once. Otherwise both texts are parsed and compared. `Wrong` means the
answer was shown not to be the gold answer (or is not mathematics at all). `Abstain` means that
nothing was shown: the text lies outside the grammar or the work outside the limits; a reward
function reports it as None, which takes the response out of training. Nothing here keeps state,
waits, or uses signals, so the verdict is the same from any thread or process.

The answer is in the last box, \\boxed{...}; a response without one may say "answer: ..." or "the
answer is ...". Finding it takes time linear in the length of the response: searches for fixed
strings and one bounded scan, no backtracking.
"""

import re
from dataclasses import dataclass, field

from verl.utils.reward_score.math_grader.compare import Comparison, plain_words
from verl.utils.reward_score.math_grader.equality import Equality
from verl.utils.reward_score.math_grader.lexer import tokenize
from verl.utils.reward_score.math_grader.nodes import (
    MAX_CHARACTERS,
    Call,
    GradingStopped,
    Malformed,
    Node,
    UnknownCommand,
    Work,
    walk,
)
from verl.utils.reward_score.math_grader.numbers import exact_number
from verl.utils.reward_score.math_grader.parser import parse

_LOOSE_SPACE = re.compile(r"(?<![0-9A-Za-z\\,])\s+|(?<!\\)\s+(?![0-9A-Za-z])")
_IN_TEXT = re.compile(r"\\(?:text[a-z]{0,6}|math[a-z]{2}|mbox)\s?\{([^{}]*)\}")
_PHRASE = re.compile(r"[\w\s.,:;'()]*")
_WORD = re.compile(r"[^\W\d_]{2}")
_LETTERS = re.compile(r"[A-J](?:,? ?(?:and )?[A-J])+")
_FORMULA_IN_TEXT = re.compile(
    r"\\text[a-z]{0,6}\{\s?(?:\$(.*)\$|(-?[0-9.,]*[0-9])[.,]?)\s?\}", re.DOTALL
)
_MONEY = re.compile(r"\\\$|[€£¥]")
_FINAL_STOP = re.compile(r"(?<!\\)[.,;:]{1,9}$")
_DIGIT_GROUP = re.compile(r"[0-9][, ][0-9]{3}")
_LETTER = r"(?:\\(?:text[a-z]{0,6}|math[a-z]{2})\s?\{\s?)?\(?([A-J])"
_LONE_LETTER = re.compile(_LETTER + r"[).:}\s]{0,4}")
_LETTER_CHOICE = re.compile(_LETTER + r"(?:[).:}]|$)")
_FURTHER_LETTER = re.compile(r"\([A-J]\)|(?<![A-Za-z])[A-J][).:}]|(?:\b(?:or|and)|[,/&])\s?[A-J]\b")


@dataclass(frozen=True)
class Correct:
    """The answer is the gold answer, perhaps written differently."""


@dataclass(frozen=True)
class Wrong:
    """The answer is something else; `reason` says how that was seen."""

    reason: str


@dataclass(frozen=True)
class Abstain:
    """The grader cannot tell; `reason` says what it could not read or work out.

    `command` is the LaTeX command, such as int, that is not in the grammar, if that is the reason.
    """

    reason: str
    command: str | None = field(default=None, repr=False, compare=False)


Verdict = Correct | Wrong | Abstain


def grade(answer: str, gold: str) -> Verdict:
    """Whether `answer` says the same as `gold`; both are what stands in a box, not solutions."""
    answer_number, gold_number = exact_number(answer), exact_number(gold)
    if answer_number is not None and gold_number is not None:
        if answer_number == gold_number:
            return Correct()
        if "," not in answer and "," not in gold:
            return Wrong("the numbers differ")
    if max(len(answer), len(gold)) > MAX_CHARACTERS:
        return Correct() if answer.strip() == gold.strip() else Abstain("the text is too long")
    answer, gold = _trimmed(answer), _trimmed(gold)
    if not gold:
        return Abstain("there is no gold answer")
    if not answer:
        return Wrong("there is no answer")
    if answer == gold:
        return Correct()
    if _is_same_phrase(answer, gold):
        return Correct()
    if any(_MONEY.search(one) and "%" in other for one, other in ((answer, gold), (gold, answer))):
        return Wrong("money against a percentage")
    return _graded_choice(answer, gold) or _graded_readings(answer, gold)


def _trimmed(text: str) -> str:
    """Without what surrounds an answer: spaces, dollars, a full stop, an equals sign, a box."""
    text = _FINAL_STOP.sub("", _LOOSE_SPACE.sub("", text).strip("$"))
    text = text.strip("$").lstrip("=").rstrip("\\ ").strip()
    formula = _FORMULA_IN_TEXT.fullmatch(text)
    text = formula.group(1) or formula.group(2) if formula else text
    return unboxed(text) if text.startswith("\\boxed{") and last_boxed(text) == text else text


def _is_same_phrase(answer: str, gold: str) -> bool:
    """Whether both are words, one of them in \\text{}, that differ in case and punctuation only."""
    if not _IN_TEXT.search(answer + gold):
        return False
    answer, gold = (_IN_TEXT.sub(r" \1 ", text).replace("$", "") for text in (answer, gold))
    for text in (answer, gold):
        text = " ".join(text.replace(".", "").split())
        is_phrase = _PHRASE.fullmatch(text) and _WORD.search(text)
        if not is_phrase and not _LETTERS.fullmatch(text):
            return False
    return _phrase(answer) == _phrase(gold)


def _phrase(text: str) -> str:
    return plain_words(text.replace(".", "")).replace(" and ", " ")


def _graded_choice(answer: str, gold: str) -> Verdict | None:
    """Where the gold answer is a letter, (B) 12 is the choice of B."""
    expected, chosen = _LONE_LETTER.fullmatch(gold), _LETTER_CHOICE.match(answer)
    if expected is None or chosen is None:
        return None
    if _FURTHER_LETTER.search(answer, chosen.end()):
        return Wrong("more than one choice")
    return Correct() if chosen.group(1) == expected.group(1) else Wrong("another choice")


def _graded_readings(answer: str, gold: str) -> Verdict:
    """1,234 may be one number or two, unless it is the gold answer; first the usual reading."""
    verdict = _graded(answer, gold, commas_group_digits=True)
    is_one_number = exact_number(gold) is not None
    if isinstance(verdict, Correct) or is_one_number or not _DIGIT_GROUP.search(f"{answer} {gold}"):
        return verdict
    as_lists = _graded(answer, gold, commas_group_digits=False)
    return as_lists if isinstance(as_lists, Correct) else verdict


def _graded(answer: str, gold: str, *, commas_group_digits: bool) -> Verdict:
    try:
        gold_tree = parse(tokenize(gold, commas_group_digits=commas_group_digits))
    except GradingStopped as reason:
        return _abstain(reason, "the gold answer cannot be read: ")
    try:
        answer_tree = parse(tokenize(answer, commas_group_digits=commas_group_digits))
    except Malformed as reason:
        return Wrong(f"not mathematics: {reason}")
    except GradingStopped as reason:
        return _abstain(reason)
    try:
        return _compared(answer_tree, gold_tree, seed=gold + "\n" + answer)
    except GradingStopped as reason:
        return _abstain(reason)


def _abstain(reason: GradingStopped, prefix: str = "") -> Abstain:
    command = reason.command if isinstance(reason, UnknownCommand) else None
    return Abstain(f"{prefix}{reason}", command)


def _compared(answer: Node, gold: Node, *, seed: str) -> Verdict:
    """\\log without a base may be the natural one: the verdict must not depend on it."""
    work = Work()
    is_ambiguous = "log" in seed and (_has_plain_log(answer) or _has_plain_log(gold))
    bases = (10, None) if is_ambiguous else (10,)
    results = {Comparison(Equality(seed, work, base)).same(gold, answer) for base in bases}
    if len(results) > 1:
        return Abstain("the base of a logarithm is not given, and matters")
    return Correct() if results.pop() else Wrong("the answers differ")


def _has_plain_log(tree: Node) -> bool:
    return any(
        isinstance(part, Call) and part.function == "log" and len(part.arguments) == 1
        for part in walk(tree)
    )


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
    """The answer of a response: its last box, else the line after its last "answer is".

    Such a line goes on to the end of an environment that it begins, such as a matrix.
    """
    box = last_boxed(text)
    if box is not None:
        return unboxed(box)
    if "\\boxed" in text:
        return None  # a box that was never closed: the response was cut off inside its answer
    lowered = text.lower()
    end = max(lowered.rfind(marker) + len(marker) * (marker in lowered) for marker in _MARKERS)
    if end < 1 or len(lowered) != len(text):
        return None
    rest = text[end : end + MAX_BOX_CHARACTERS].lstrip()
    line, *further = rest.split("\n")
    while further and line.count("\\begin{") > line.count("\\end{"):
        line += "\n" + further.pop(0)
    return line.lstrip(": ").strip() or None
