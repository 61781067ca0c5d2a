"""How often the mathematics grader is wrong, how fast it is, and what the worst answers cost.

    python benchmarks/graders.py              rates and costs, a minute
    python benchmarks/graders.py --corpus     also the graders on the corpus of the tests, minutes

One thread, CPU time. Each kind of answer is a list of pairs, right and wrong ones, graded over and
over; the table shows the median over the runs. `in a response` includes finding the box at the end
of 2,000 characters. math-verify, where installed, judges the same pairs in its worker process (wall
time, for the work is in another process). The last rows are the slowest hostile texts of the tests.
On the corpus, a right answer that is not called right is missed (also where the grader abstains), a
wrong one that is called right is forged. Everything goes to `benchmarks/results/graders.json`.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.utils.reward_score.math_grader.corpus import read
from tests.utils.reward_score.math_grader.hostile import expensive
from verl.utils.import_utils import is_available
from verl.utils.reward_score import math_verify, prime_math
from verl.utils.reward_score.math_grader import Correct, Verdict, Wrong, grade
from verl.utils.reward_score.math_grader.numbers import exact_number

RESULTS = Path(__file__).parent / "results" / "graders.json"
Pairs = list[tuple[str, str]]

PLAIN: Pairs = [("72", "72"), ("72", "71"), ("-5", "-5"), ("0", "12"), ("1000000", "1000001")]
NUMERIC: Pairs = [
    ("72", "72"), ("72", "71"), ("0.5", r"\frac{1}{2}"), (r"\frac{3}{4}", "0.75"), ("3/4", "0.76"),
    ("1,234", "1234"), ("-5", "-5.0"), (r"\dfrac{7}{3}", "7/3"), ("12.50", "12.5"), ("18", "180"),
]  # fmt: skip
MARKED: Pairs = [
    (r"50\%", "0.5"), (r"\$5", "5.00"), (r"5 \text{ cm}", "5"), (r"1.5 \times 10^3", "1500"),
    (r"2\frac{1}{3}", r"\frac73"), (r"30^\circ", "30"), ("1011_2", "11"), (r"x = 5", "6"),
]  # fmt: skip
SYMBOLIC: Pairs = [
    (r"\frac{\sqrt{3}}{2}", r"\frac{3}{2\sqrt3}"), ("x^2+2x+1", "(x+1)^2"), ("5x^2", "6x^2"),
    (r"\left(1,\frac42\right)", "(1,2)"), (r"\{1,2,3\}", r"\{3,2,1\}"), ("2xy-3", "-3+2yx"),
    (r"3+\sqrt2", r"\sqrt2+3"), (r"36\pi", r"36 \pi \text{ cm}^2"), ("x=5", "5"),
    (r"\frac{\pi}{6}", r"\pi/6"), (r"(-\infty,3]", r"x\le 3"), (r"2\frac{1}{3}", r"\frac73"),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--corpus", action="store_true")
    arguments = parser.parse_args()
    kinds = {
        "integers": (PLAIN, grade),
        "numbers": (NUMERIC, grade),
        "numbers in a response": (NUMERIC, grade_response),
        "numbers with units and marks": (MARKED, grade),
        "symbolic": (SYMBOLIC, grade),
    }
    rates = {
        name: statistics.median(grades_per_second(*kind) for _ in range(arguments.runs))
        for name, kind in kinds.items()
    }
    if is_available("math_verify"):
        for name, pairs in (("numbers", NUMERIC), ("symbolic", SYMBOLIC)):
            rates[f"{name}, math-verify"] = math_verify_per_second(pairs)
    worst = worst_texts()
    show(rates, worst)
    corpus = on_corpus() if arguments.corpus else None
    record = {
        "command": " ".join(["python", *sys.argv]),
        "python": platform.python_version(),
        "math-verify": version("math-verify") if is_available("math_verify") else None,
        "grades_per_second": rates,
        "worst_cpu_milliseconds": dict(worst[:10]),
        "corpus": corpus,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


def grade_response(answer: str, gold: str) -> Any:
    return prime_math.compute_score("Let us think. " * 140 + f"So it is \\boxed{{{answer}}}.", gold)


def grades_per_second(pairs: Pairs, function: Callable[[str, str], Any]) -> float:
    num_grades = 0
    start = time.process_time()
    while time.process_time() - start < 0.2:
        for answer, gold in pairs:
            function(answer, gold)
        num_grades += len(pairs)
    return num_grades / (time.process_time() - start)


def math_verify_per_second(pairs: Pairs) -> float:
    math_verify.second_opinion("\\boxed{1}", "1")  # starts the worker
    start = time.perf_counter()
    for answer, gold in pairs * 5:
        math_verify.second_opinion(f"\\boxed{{{answer}}}", gold)
    return 5 * len(pairs) / (time.perf_counter() - start)


def worst_texts() -> list[tuple[str, float]]:
    """Milliseconds of CPU time by name, slowest first; the least of three, against two golds."""
    times: dict[str, float] = {}
    for name, text in expensive().items():
        measured = []
        for gold in ("5", "1+" + text):
            runs = []
            for _ in range(3):
                start = time.process_time()
                grade(text, gold)
                runs.append(1000 * (time.process_time() - start))
            measured.append(min(runs))
        times[name] = max(measured)
    return sorted(times.items(), key=lambda item: -item[1])


def library(answer: str, gold: str) -> Verdict:
    return math_verify.second_opinion(f"\\boxed{{{answer}}}", gold)


def fast_path_and_library(answer: str, gold: str) -> Verdict:
    values = exact_number(answer), exact_number(gold)
    if answer.strip() == gold.strip():
        return Correct()
    if None in values:
        return library(answer, gold)
    return Correct() if values[0] == values[1] else Wrong("the numbers differ")


def on_corpus() -> dict[str, Any]:
    """By grader: answers judged a second, shares missed and forged by part, and misses by kind."""
    graders = {"exact grader": grade}
    if is_available("math_verify"):
        graders |= {
            "exact grader, then math-verify": math_verify.grade_or_ask,
            "math-verify": library,
            "fast path, then math-verify": fast_path_and_library,
        }
    rows = read()
    table = Table("grader", "part", "missed", "forged", "grades a second")
    results: dict[str, Any] = {}
    for name, judge in graders.items():
        start = time.perf_counter()
        is_called_right = [judge(row["answer"], row["gold"]) == Correct() for row in rows]
        rate = len(rows) / (time.perf_counter() - start)
        judged = list(zip(rows, is_called_right, strict=True))
        results[name] = {"grades_per_second": rate, "misjudged": misjudged_by_kind(judged)}
        for part in ("tuned", "held out"):
            shares = [
                [
                    called
                    for row, called in judged
                    if (row["part"], row["verdict"]) == (part, verdict)
                ]
                for verdict in ("right", "wrong")
            ]
            missed = 1 - statistics.mean(shares[0])
            forged = statistics.mean(shares[1])
            results[name][part] = {"missed": missed, "forged": forged}
            table.add_row(name, part, f"{missed:.2%}", f"{forged:.2%}", f"{rate:,.0f}")
    Console().print(table)
    return results


def misjudged_by_kind(judged: list[tuple[dict[str, str], bool]]) -> dict[str, int]:
    kinds = [row["kind"] for row, called in judged if called != (row["verdict"] == "right")]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def show(rates: dict[str, float], worst: list[tuple[str, float]]) -> None:
    table = Table("answers", "grades a second")
    for name, rate in rates.items():
        table.add_row(name, f"{rate:,.0f}")
    hostile = Table("hostile text", "CPU ms")
    for name, milliseconds in worst[:5]:
        hostile.add_row(name, f"{milliseconds:.1f}")
    console = Console()
    console.print(table)
    console.print(hostile)


if __name__ == "__main__":
    main()
