"""No text may cost more than a tenth of a second or 64 MB, whatever it asks for."""

import subprocess
import sys
import time

import pytest

from tests.utils.reward_score.math_grader.hostile import expensive
from verl.utils.reward_score import default_compute_score, math_dapo, math_reward
from verl.utils.reward_score.math_grader import Abstain, Correct, Wrong, final_answer, grade

EXPENSIVE = expensive()
MAX_CPU_SECONDS = 0.1


def cpu_seconds(call, *args) -> float:
    """The least of three, for other processes on the machine cost CPU time here too."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        call(*args)
        times.append(time.thread_time() - start)
        if times[-1] < MAX_CPU_SECONDS:
            break
    return min(times)


@pytest.mark.parametrize("name", EXPENSIVE)
def test_every_expensive_text_gets_a_verdict_or_an_abstention_in_time(name):
    text = EXPENSIVE[name]
    for answer, gold in [
        (text, "5"), ("5", text), (text, text), ("1+" + text, text), (text + "+0", text),
        (text, text[::-1]),
    ]:  # fmt: skip
        assert isinstance(grade(answer, gold), Correct | Wrong | Abstain)
        assert cpu_seconds(grade, answer, gold) < MAX_CPU_SECONDS


@pytest.mark.parametrize(
    ("within", "beyond", "reason"),
    [
        ("(" * 24 + "x+1" + ")" * 24, "(" * 25 + "x+1" + ")" * 25, "nested more than 24 deep"),
        ("x+1" + "+0" * 298, "x+1" + "+0" * 299, "more than 600 parts"),
        ("1+x" + " " * 1997, "1+x" + " " * 1998, "too long"),
    ],
    ids=["brackets", "tokens", "characters"],
)
def test_a_limit_is_where_the_page_on_graders_says(within, beyond, reason):
    assert grade(within, "x+1") == Correct()
    verdict = grade(beyond, "x+1")
    assert isinstance(verdict, Abstain)
    assert reason in verdict.reason


@pytest.mark.parametrize(
    "name", ["power tower", "huge factorial", "million digits", "deep brackets", "large matrix"]
)
def test_what_cannot_be_computed_is_not_called_wrong(name):
    assert isinstance(grade(EXPENSIVE[name], "5"), Abstain)
    assert grade(EXPENSIVE[name], EXPENSIVE[name]) == Correct()


@pytest.mark.parametrize("source", ["lighteval/MATH", "math_dapo", "numina_olympiads"])
def test_scorers_stay_within_the_limit_too(source):
    for name, text in EXPENSIVE.items():
        response = f"\\boxed{{{text}}} Answer: {text}"
        seconds = cpu_seconds(default_compute_score, source, response, "5")
        assert seconds < MAX_CPU_SECONDS, name


MEMORY_PROGRAM = """
import resource
from tests.utils.reward_score.math_grader.hostile import expensive
from verl.utils.reward_score.math_grader import grade
texts = expensive()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for text in texts.values():
    grade(text, "5")
    grade("1+" + text, text)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_all_of_them_together_take_less_than_64_megabytes():
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert int(result.stdout) * 1024 < 64 * 2**20


# ---- extraction is linear ------------------------------------------------------------------------

REPEATED = [
    "\\boxed{", "\\boxed{}", "{", "}", "{}", "\\", "\\\\", "answer is ", "Answer:", "answer : ",
    " ", "\n", "x", "$", "####", "<answer>", "</answer>", "<answer></answer>", "\\text{", "frac",
    "1,", "\\boxed 5", "Answer: 5\n", "=", "\\fbox{",
]  # fmt: skip
EXTRACTORS = {
    "final_answer": final_answer,
    "math_reward": lambda text: math_reward.compute_score(text, "5"),
    "strip_string": math_reward.strip_string,
    "normalize_final_answer": math_dapo.normalize_final_answer,
    "math_dapo": lambda text: math_dapo.compute_score(text, "5"),
    "search": lambda text: default_compute_score("searchR1_nq", text, {"target": ["5"]}),
    "geo3k": lambda text: default_compute_score("hiyouga/geometry3k", text, "5"),
    "gsm8k": lambda text: default_compute_score("gsm8k", text, "5"),
}


@pytest.mark.parametrize("name", EXTRACTORS)
def test_extraction_of_a_million_characters_is_linear_and_fast(name):
    extract = EXTRACTORS[name]
    for piece in REPEATED:
        for prefix in ("", "\\boxed{", "<answer>", "Answer: "):
            text = prefix + piece * (10**6 // len(piece))
            assert cpu_seconds(extract, text) < MAX_CPU_SECONDS, (piece, prefix)


@pytest.mark.parametrize("name", EXTRACTORS)
def test_twice_the_text_takes_at_most_a_little_more_than_twice_the_time(name):
    extract = EXTRACTORS[name]
    for piece in REPEATED:
        short = piece * (5 * 10**5 // len(piece))
        if cpu_seconds(extract, short + short) < 0.005:  # too fast for the ratio to mean anything
            continue
        ratio = min(
            cpu_seconds(extract, short + short) / cpu_seconds(extract, short) for _ in range(5)
        )
        assert ratio < 3, piece  # four times, if each part looked at all the others
