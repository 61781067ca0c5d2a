"""The configuration of `main_eval`: score responses that were generated before."""

from dataclasses import dataclass

from verl.config.base import BaseConfig, option
from verl.config.reward import CustomRewardFunctionConfig
from verl.config.trainer import RayKwargsConfig


@dataclass(kw_only=True)
class EvaluationDataConfig(BaseConfig):
    """Responses to score."""

    path: str = "/tmp/math_Qwen2-7B-Instruct.parquet"
    """Parquet file with the responses."""

    prompt_key: str = "prompt"
    """Column with the prompt."""

    response_key: str = "responses"
    """Column with the list of responses to the prompt."""

    data_source_key: str = "data_source"
    """Column whose value chooses the reward function and groups the scores."""

    reward_model_key: str = "reward_model"
    """Column with the answer, as `{ground_truth: ...}`."""

    output_path: str | None = None
    """File for the result as JSON; null writes none."""


@dataclass(kw_only=True)
class GradingConfig(BaseConfig):
    """How responses are graded."""

    controller: str = option("local", choices=("local", "ray"))
    """Where reward functions run: in processes of this machine (`local`) or of a Ray cluster."""

    num_workers: int | None = option(None, minimum=1)
    """Processes, each of which grades one response at a time; null takes one per core of the
    cluster, or here `ray_kwargs.ray_init.num_cpus` or else one per core."""

    timeout_seconds: float = option(60.0, above=0)
    """Longest time for one response; then the process is killed and the response has no score."""

    pass_threshold: float = 1.0
    """A response passes (pass@k) when its `acc`, or its score where the function reports no `acc`,
    is at least this."""


@dataclass(kw_only=True)
class EvaluationConfig(BaseConfig):
    """Scoring responses that were generated before."""

    data: EvaluationDataConfig = option(default_factory=EvaluationDataConfig)
    """Responses to score."""

    grading: GradingConfig = option(default_factory=GradingConfig)
    """How responses are graded."""

    custom_reward_function: CustomRewardFunctionConfig = option(
        default_factory=CustomRewardFunctionConfig
    )
    """A reward function of your own."""

    ray_kwargs: RayKwargsConfig = option(default_factory=RayKwargsConfig)
    """Ray, where it is used."""
