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


@dataclass(kw_only=True)
class EvaluationConfig(BaseConfig):
    """Scoring responses that were generated before."""

    data: EvaluationDataConfig = option(default_factory=EvaluationDataConfig)
    """Responses to score."""

    custom_reward_function: CustomRewardFunctionConfig = option(
        default_factory=CustomRewardFunctionConfig
    )
    """A reward function of your own."""

    ray_kwargs: RayKwargsConfig = option(default_factory=RayKwargsConfig)
    """Ray, where it is used."""
