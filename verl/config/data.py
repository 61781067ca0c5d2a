"""Where prompts come from and how they are read.

A row has a `prompt` (chat messages or a string), a `data_source` that chooses the reward function,
and the answer to compare with. Files may be parquet or JSON.
"""

from dataclasses import dataclass
from typing import Any

from verl.config.base import BaseConfig, When, never, option, while_on
from verl.config.roles import FILTERED, async_mode, is_training


@dataclass(kw_only=True)
class CustomClassConfig(BaseConfig):
    """A class of your own, taken from a file."""

    path: str | None = None
    """File, or `pkg://package.module`; null uses the built-in class."""

    name: str | None = option(
        None,
        used_if=When(
            lambda here, run: here.path is not None, "path is null: the built-in class is used"
        ),
    )
    """Name of the class."""


@dataclass(kw_only=True)
class SamplerConfig(BaseConfig):
    """The order in which training rows are drawn, for example a curriculum."""

    class_path: str | None = None
    """File, or `pkg://package.module`, of a sampler; null draws at random or in order."""

    class_name: str | None = option(
        None, used_if=When(lambda here, run: here.class_path is not None, "class_path is null")
    )
    """Name of the class, an `AbstractSampler`."""


READABLE = (".parquet", ".json", ".jsonl", ".ndjson")
"""Suffixes of files that rows are read from."""


@dataclass(kw_only=True)
class DataConfig(BaseConfig):
    """Prompts for training and validation."""

    train_files: str | list[str] = "~/data/rlhf/gsm8k/train.parquet"
    """File or files with training prompts."""

    val_files: str | list[str] | None = "~/data/rlhf/gsm8k/test.parquet"
    """File or files with validation prompts; null validates nothing."""

    train_batch_size: int = option(1024, minimum=0)
    """Prompts per training step; times `rollout.n` gives sequences."""

    gen_batch_size: int = option(
        1024,
        yaml="${.train_batch_size}",
        minimum=0,
        used_if=When(
            lambda here, run: (
                run.algorithm.filter_groups.enable or async_mode(run) == "fully_async"
            ),
            "algorithm.filter_groups.enable is off: each step draws what it trains on",
        ),
    )
    """Prompts per generation batch, where it differs (dynamic sampling, asynchronous training)."""

    filter_accuracy: bool = False
    """Prefer prompts whose responses are right (`acc`, or the score) between `accuracy_lower_bound`
    and `accuracy_upper_bound` on average: draw more prompts than a step trains on, train on those
    first and fill up with others."""

    accuracy_lower_bound: float = option(0.2, used_if=while_on("filter_accuracy"))
    """Least mean accuracy of a prompt that is preferred."""

    accuracy_upper_bound: float = option(0.8, used_if=while_on("filter_accuracy"))
    """Largest mean accuracy of a prompt that is preferred."""

    filter_truncate: bool = False
    """Prefer prompts none of whose responses has reached `max_response_length`, in the same way."""

    oversample_factor: float = option(4.0, minimum=1, used_if=FILTERED)
    """Prompts drawn for a step, as a multiple of `train_batch_size`, where some are preferred."""

    val_batch_size: int | None = option(None, minimum=1)
    """Prompts per validation batch; null takes the whole set at once."""

    max_prompt_length: int = option(512, minimum=1)
    """Most tokens in a prompt. What happens to longer ones is up to `filter_overlong_prompts` and
    `truncation`."""

    max_response_length: int = option(512, minimum=1)
    """Most tokens in a response, tool output included."""

    filter_overlong_prompts: bool = False
    """Drop prompts longer than `max_prompt_length` before training."""

    filter_overlong_prompts_workers: int = option(
        1,
        minimum=1,
        used_if=while_on("filter_overlong_prompts"),
    )
    """Processes that measure prompts for that."""

    truncation: str = option("error", choices=("error", "left", "right", "middle"))
    """What to do with a prompt that is still too long: stop with an error, or cut this side."""

    train_max_samples: int = option(-1, minimum=-1)
    """Use only this many training rows; -1 uses all."""

    val_max_samples: int = option(-1, minimum=-1)
    """Use only this many validation rows; -1 uses all."""

    shuffle: bool = True
    """Draw training rows in random order."""

    validation_shuffle: bool = False
    """Draw validation rows in random order."""

    seed: int | None = None
    """Seed of the random order; null takes 1, so that a run can be repeated."""

    dataloader_num_workers: int = option(
        8, minimum=0, used_if=never("a row is read when it is needed")
    )
    """Accepted for older scripts: a row is read when it is needed, which takes well under a
    millisecond."""

    prompt_key: str = "prompt"
    """Column with the prompt."""

    chosen_key: str | None = option(
        None,
        used_if=When(
            lambda here, run: is_training(run) and run.trainer.recipe == "spin",
            "only trainer.recipe=spin uses it",
        ),
    )
    """Column with an answer that is preferred to every response; null prefers the response with the
    best reward."""

    reward_fn_key: str = "data_source"
    """Column whose value chooses the reward function."""

    image_key: str = "images"
    """Column with images."""

    video_key: str = "videos"
    """Column with videos."""

    image_patch_size: int = option(
        14, minimum=1, used_if=never("the processor of the model knows the size of its patches")
    )
    """Pixels per side of a vision patch."""

    mm_processor_kwargs: dict[str, Any] = option(default_factory=dict)
    """More keyword arguments for the model's image processor, for example `size`."""

    tokenizer: str | None = None
    """Tokenizer; null takes the model's."""

    chat_template: str | None = None
    """Chat template in place of the tokenizer's: `chatml`, or Jinja text; null takes
    `actor_rollout_ref.model.custom_chat_template`."""

    apply_chat_template_kwargs: dict[str, Any] = option(default_factory=dict)
    """More keyword arguments for `apply_chat_template`, for example `enable_thinking`."""

    tool_config_path: str | None = option(
        None,
        yaml="${oc.select:actor_rollout_ref.rollout.multi_turn.tool_config_path,null}",
    )
    """Tools to count when prompts are measured; follows `rollout.multi_turn`."""

    function_tool_path: str | None = option(
        None,
        yaml="${oc.select:actor_rollout_ref.rollout.multi_turn.function_tool_path,null}",
    )
    """Functions to count when prompts are measured; follows `rollout.multi_turn`."""

    need_tools_kwargs: bool = False
    """Warn about rows without `tools_kwargs`."""

    trust_remote_code: bool = False
    """Run Python code that comes with the tokenizer. Only for authors you trust."""

    use_shm: bool = False
    """Copy the files to shared memory first."""

    cache_dir: str = "~/.cache/verl/rlhf"
    """Folder for copies of remote files, large parquet files unpacked, and reports of bad rows."""

    custom_cls: CustomClassConfig = option(default_factory=CustomClassConfig)
    """A dataset class of your own."""

    sampler: SamplerConfig = option(default_factory=SamplerConfig)
    """The order in which training rows are drawn."""

    datagen: CustomClassConfig = option(default_factory=CustomClassConfig)
    """A generator that adds training rows while training goes on."""

    output_path: str | None = option(None, used_if=never("only main_generation_server writes it"))
    """File that `main_generation_server` writes."""

    return_raw_chat: bool = option(True, used_if=never("the messages are always part of a row"))
    """Accepted for older scripts: the messages are always part of a row."""

    return_raw_input_ids: bool = False
    """Add `raw_prompt_ids`, the token ids of the prompt, to each row; without it a row computes
    them when they are asked for."""

    return_full_prompt: bool = False
    """Add `full_prompts`, the templated text of the prompt, to each row; without it a row computes
    it when it is asked for."""

    return_multi_modal_inputs: bool = True
    """Let rows with images or videos compute `multi_modal_inputs`, the processor's outputs, when
    these are asked for."""

    chat_template_func: str | None = option(None, used_if=never("chat_template takes its place"))
    """Accepted for older scripts; has no effect."""

    filter_prompts: bool = option(True, used_if=never("filter_overlong_prompts decides"))
    """Accepted for older scripts; `filter_overlong_prompts` decides."""

    project_name: str = option("", used_if=never("trainer.project_name decides"))
    """Accepted for older scripts; dumped generations are named after `trainer.project_name`."""

    experiment_name: str = option("", used_if=never("trainer.experiment_name decides"))
    """Accepted for older scripts; dumped generations are named after `trainer.experiment_name`."""
