"""Text from a model is read, never run: not as Python, not as a shell command, not as a format."""

import ast
import asyncio
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, getcontext, localcontext
from pathlib import Path

import pytest

from tests.utils.reward_score.math_grader.corpus import read
from tests.utils.reward_score.math_grader.hostile import injections
from verl.utils import reward_score
from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.math_grader import Correct, grade

PACKAGE = Path(reward_score.__file__).parent
GRADED = ["*.py", "math_grader/*.py"]
RUNS_TEXT = {"eval", "exec", "compile", "__import__", "getattr", "setattr", "globals", "vars"}
NEEDED_BY_GRADER = {
    "re", "math", "random", "zlib", "decimal", "fractions", "functools", "typing",
    "contextlib", "collections", "dataclasses", "verl",
}  # fmt: skip


@pytest.mark.parametrize("path", [p for g in GRADED for p in sorted(PACKAGE.glob(g))], ids=str)
def test_no_scorer_calls_anything_that_runs_text(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = {node.func.id for node in calls if isinstance(node.func, ast.Name)}
    assert not names & RUNS_TEXT


def test_the_grader_imports_only_what_cannot_reach_outside():
    imported = set()
    for path in sorted(PACKAGE.glob("math_grader/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    assert imported <= NEEDED_BY_GRADER


def test_two_hundred_injections_execute_nothing_and_earn_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [text.replace("{mark}", str(tmp_path / "mark")) for text in injections()]
    assert len(set(texts)) == 200
    for text in texts:
        assert grade(text, "5") != Correct()
        grade("5", text)
        for source in ("lighteval/MATH", "numina_cn_k12", "hiyouga/geometry3k", "gsm8k"):
            default_compute_score(source, f"\\boxed{{{text}}}\n#### {text}", "5")
        default_compute_score("math", f"Answer: {text}", "5")
        default_compute_score("searchR1_nq", f"<answer>{text}</answer>", {"target": "5"})
    assert list(tmp_path.iterdir()) == []


# ---- the same verdict from everywhere ------------------------------------------------------------

SAMPLE = read()[::9]


def verdicts() -> list:
    return [grade(row["answer"], row["gold"]) for row in SAMPLE]


def test_threads_tasks_and_processes_give_the_same_verdicts():
    expected = verdicts()
    with ThreadPoolExecutor(4) as threads:
        assert [future.result(60) for future in [threads.submit(verdicts) for _ in range(4)]] == [
            expected
        ] * 4

    async def gathered() -> list:
        return await asyncio.gather(*(asyncio.to_thread(verdicts) for _ in range(2)))

    assert asyncio.run(gathered()) == [expected] * 2
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(verdicts).get(timeout=60) == expected


def test_the_threads_decimal_context_neither_matters_nor_changes():
    expected = verdicts()
    with localcontext() as context:
        context.prec = 3
        context.Emax = 9
        assert verdicts() == expected
        assert getcontext().prec == 3
        assert Decimal(1) / Decimal(3) == Decimal("0.333")


def test_grading_works_with_little_stack_left():
    """A grade needs less than half of the interpreter's default of a thousand frames."""
    results = []

    def descend(frames: int) -> None:
        if frames:
            descend(frames - 1)
        else:
            deepest = "(" * 24 + "1" + ")" * 24
            results.append(grade(f"\\sqrt{{{deepest[3:-3]}}}+1", "2"))

    thread = threading.Thread(target=descend, args=(500,))
    thread.start()
    thread.join(60)
    assert results == [Correct()]
