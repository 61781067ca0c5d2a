"""A language model that gives one number per token instead of a distribution: critic, reward model.

Both are the transformer of a causal language model and a linear layer `score` with one output. A
critic's checkpoint that has such a layer keeps it; otherwise it starts at zero, so that a fresh
critic predicts 0 everywhere instead of noise.

The score of a text is what a reward model's layer reads at the last token. Sequence classifiers,
token classifiers and language models with a value head differ in the class that their configuration
names, not in these weights. A checkpoint without such a layer is refused: a random head would
reward noise.
"""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from verl.models.attention import ATTENTION
from verl.models.loading import prepare_layers, read_config


def load_value_model(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    override_config: dict[str, object] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load the model at `path` with a scalar head, ready to be packed."""
    model, missing = load_with_head(
        AutoModelForTokenClassification,
        path,
        dtype=dtype,
        override_config=override_config,
        trust_remote_code=trust_remote_code,
    )
    if "score.weight" in missing:
        zero_head(model)
    return model.to(device)  # pyright: ignore[reportArgumentType]


def empty_value_model(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    override_config: dict[str, object] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The same on the meta device: everything but its weights, which are not read."""
    with torch.device("meta"):
        model = AutoModelForTokenClassification.from_config(
            read_config(path, override_config, trust_remote_code, num_labels=1),
            dtype=dtype,
            attn_implementation=ATTENTION,
            trust_remote_code=trust_remote_code,
        )
    return prepare_layers(model)


def load_with_head(
    auto_class: Any,
    path: str,
    *,
    dtype: torch.dtype,
    override_config: dict[str, object] | None,
    trust_remote_code: bool,
    **options: Any,
) -> tuple[PreTrainedModel, set[str]]:
    """The model with one label, and which of its weights the checkpoint does not have.

    A head that was saved without a bias is one with a bias of 0.
    """
    model, loading = auto_class.from_pretrained(
        path,
        config=read_config(path, override_config, trust_remote_code, num_labels=1),
        dtype=dtype,
        attn_implementation=ATTENTION,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        **options,
    )
    missing = set(loading["missing_keys"])
    if "score.bias" in missing:
        nn.init.zeros_(score_head(model).bias)
    return prepare_layers(model), missing


def zero_head(model: PreTrainedModel) -> None:
    for parameter in score_head(model).parameters():
        nn.init.zeros_(parameter)


def score_head(model: PreTrainedModel) -> nn.Linear:
    head = dict(model.named_children()).get("score")
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ValueError(
            f"{type(model).__name__} has no linear layer `score` with one output; "
            "a value model needs one (AutoModelForTokenClassification with num_labels=1)"
        )
    return head


VALUE_HEAD = {r"^v_head\.summary\.": "score."}
"""The layer's name in checkpoints of language models that carry a value head."""


def load_reward_model(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    override_config: dict[str, object] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load the model at `path` (a folder or a hub name) with its head, ready to be packed."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    kinds = [name.rpartition("For")[2] for name in config.architectures or []]
    if any(kind.endswith("Classification") for kind in kinds) and config.num_labels != 1:
        raise ValueError(
            f"reward_model.model.path={path} is a classifier with {config.num_labels} labels; a "
            "reward model has one output, the score: train it with num_labels=1"
        )
    is_sequence = "SequenceClassification" in kinds
    model, missing = load_with_head(
        AutoModelForSequenceClassification if is_sequence else AutoModelForTokenClassification,
        path,
        dtype=dtype,
        override_config=override_config,
        trust_remote_code=trust_remote_code,
        key_mapping=VALUE_HEAD,
    )
    score_head(model)
    lacking = sorted(missing - {"score.bias"})
    if lacking:
        raise ValueError(
            f"reward_model.model.path={path} has no {', '.join(lacking[:5])}; a reward model is a "
            "sequence or token classifier with one label, or a language model with a value head. "
            "examples/reward_model trains one"
        )
    return model.to(device)  # pyright: ignore[reportArgumentType]
