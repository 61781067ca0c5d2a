"""Which dataclass stands for which YAML file."""

from verl.config.base import BaseConfig
from verl.config.evaluation import EvaluationConfig
from verl.config.generation import GenerationConfig
from verl.config.ppo import PPOConfig, PPOMegatronConfig
from verl.config.sft import SFTConfig, SFTEngineConfig

ROOTS: dict[str, type[BaseConfig]] = {
    "ppo_trainer": PPOConfig,
    "ppo_megatron_trainer": PPOMegatronConfig,
    "sft_trainer": SFTConfig,
    "sft_trainer_engine": SFTEngineConfig,
    "evaluation": EvaluationConfig,
    "generation": GenerationConfig,
}
