"""Built-in reward functions; the row's `data_source` chooses one.

Each entry of `scorers` takes (solution_str, ground_truth, extra_info, **options) and returns a
number, a tuple whose first entry is one, or a mapping with `score`; None abstains. A dataset that
none of them knows needs a function of the user's, `custom_reward_function.path`.
"""

import hashlib
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from verl.utils.import_utils import deprecated, is_available
from verl.utils.registry import Registry
from verl.utils.reward_score import (
    geo3k,
    gsm8k,
    math_dapo,
    math_reward,
    prime_math,
    search_r1_like_qa_em,
)

Scorer = Callable[..., Any]
scorers = Registry[Scorer]("data source")


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> float | dict[str, Any] | None:
    """The score of one response by the function built in for its data source.

    Mappings are returned as they are, numbers as float, of a tuple the first entry as float. None
    means that the grader could not grade the response.
    """
    result = _scorer_for(data_source)(
        solution_str,
        ground_truth,
        extra_info,
        sandbox_fusion_url=sandbox_fusion_url,
        concurrent_semaphore=concurrent_semaphore,
        memory_limit_mb=memory_limit_mb,
        **kwargs,
    )
    if isinstance(result, Mapping):
        return dict(result)
    score = result[0] if isinstance(result, tuple) else result
    return None if score is None else float(score)


def graders_identity() -> dict[str, str]:
    """Hash of the built-in graders' source, and the math-verify they would ask: a run that goes on
    with others would be rewarded by other rules."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    library = version("math-verify") if is_available("math_verify") else "not installed"
    return {"verl.utils.reward_score": digest.hexdigest()[:32], "math-verify": library}


@deprecated("verl.utils.reward_score.default_compute_score")
def _default_compute_score(*args: Any, **kwargs: Any) -> float | dict[str, Any] | None:
    return default_compute_score(*args, **kwargs)


def _scorer_for(data_source: str) -> Scorer:
    if data_source in scorers:
        return scorers[data_source]
    if str(data_source).startswith("aime"):
        return scorers["math_dapo"]
    raise NotImplementedError(
        f"there is no built-in reward function for data_source={data_source!r}; set "
        f"custom_reward_function.path, or use a known data source: {', '.join(scorers)}, aime*"
    )


def grading_fault(data_source: Any, ground_truth: Any) -> str | None:
    """Why the built-in functions cannot grade a row, or None; those of users may need no answer."""
    if data_source is None:
        return (
            "has no data source, which chooses the built-in reward function; fill the column that "
            "data.reward_fn_key names, or set custom_reward_function.path"
        )
    try:
        scorer = _scorer_for(data_source)
    except NotImplementedError as error:
        return str(error)
    if ground_truth is None and scorer.__module__ == __name__:
        return (
            f"has no answer to compare with, which {data_source!r} needs; fill "
            "reward_model.ground_truth, or set custom_reward_function.path"
        )
    return None


# ---- the functions behind the data sources -------------------------------------------------------


def _built_in(*data_sources: str) -> Callable[[Scorer], Scorer]:
    def add(scorer: Scorer) -> Scorer:
        for data_source in data_sources:
            scorers.register(data_source, built_in=True)(scorer)
        return scorer

    return add


@_built_in("openai/gsm8k", "gsm8k")
def _gsm8k(solution_str: str, ground_truth: Any, extra_info: Any, **options: Any) -> float:
    return gsm8k.compute_score(solution_str, ground_truth)


@_built_in("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
def _math(solution_str: str, ground_truth: Any, extra_info: Any, **options: Any) -> float:
    return math_reward.compute_score(solution_str, ground_truth)


@_built_in("math_dapo", "math", "math_dapo_reasoning")
def _dapo(solution_str: str, ground_truth: Any, extra_info: Any, **options: Any) -> dict[str, Any]:
    return math_dapo.compute_score(solution_str, ground_truth)


@_built_in(
    "numina_aops_forum",
    "numina_synthetic_math",
    "numina_amc_aime",
    "numina_synthetic_amc",
    "numina_cn_k12",
    "numina_olympiads",
)
def _numina(
    solution_str: str, ground_truth: Any, extra_info: Any, **options: Any
) -> tuple[float | None, float, str]:
    return prime_math.compute_score(solution_str, ground_truth)


@_built_in("hiyouga/geometry3k")
def _geo3k(solution_str: str, ground_truth: Any, extra_info: Any, **options: Any) -> float | None:
    return geo3k.compute_score(solution_str, ground_truth)


@_built_in(
    "searchR1_nq",
    "searchR1_triviaqa",
    "searchR1_popqa",
    "searchR1_hotpotqa",
    "searchR1_2wikimultihopqa",
    "searchR1_musique",
    "searchR1_bamboogle",
)
def _search(solution_str: str, ground_truth: Any, extra_info: Any, **options: Any) -> float:
    return search_r1_like_qa_em.compute_score(solution_str, ground_truth)


@_built_in("codecontests", "apps", "codeforces", "taco")
def _code(
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
    *,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **options: Any,
) -> tuple[float, list[Any]]:
    """The fraction of the first ten tests passed, on a Sandbox Fusion server or in our sandbox."""
    if sandbox_fusion_url:
        from verl.utils.reward_score import sandbox_fusion  # noqa: PLC0415 - only for code

        return sandbox_fusion.compute_score(
            sandbox_fusion_url,
            concurrent_semaphore,
            memory_limit_mb,
            solution_str,
            ground_truth,
            continuous=True,
        )
    from verl.utils.reward_score import prime_code  # noqa: PLC0415 - only for code

    return prime_code.compute_score(solution_str, ground_truth, continuous=True)
