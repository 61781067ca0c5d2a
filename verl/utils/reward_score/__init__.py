"""Built-in reward functions; the row's `data_source` chooses one.

Each entry of `scorers` takes (solution_str, ground_truth, extra_info, **options) and returns a
number or a mapping with `score`. A dataset that none of them knows needs a function of the user's,
`custom_reward_function.path`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from verl.utils.import_utils import deprecated
from verl.utils.registry import Registry
from verl.utils.reward_score import gsm8k

Scorer = Callable[..., Any]
scorers = Registry[Scorer]("data source")


@scorers.register("openai/gsm8k", built_in=True)
@scorers.register("gsm8k", built_in=True)
def _gsm8k(solution_str: str, ground_truth: Any, extra_info: Any, **options: Any) -> float:
    return gsm8k.compute_score(solution_str, ground_truth)


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """The score of one response by the function built in for its data source.

    Mappings are returned as they are, numbers as float, of a tuple the first entry as float.
    """
    if data_source not in scorers:
        raise NotImplementedError(
            f"there is no built-in reward function for data_source={data_source!r}; there is one "
            f"for: {', '.join(scorers)}. For other data set custom_reward_function.path"
        )
    result = scorers[data_source](
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
    return float(result[0] if isinstance(result, tuple) else result)


@deprecated("verl.utils.reward_score.default_compute_score")
def _default_compute_score(*args: Any, **kwargs: Any) -> float | dict[str, Any]:
    return default_compute_score(*args, **kwargs)
