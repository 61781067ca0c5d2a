"""A trained reward model: a transformer and a linear layer that says how good a text is.

The layer is called `score` and has one output. It reads the last hidden state, and the score of a
text is what it reads at the last token. Sequence classifiers, token classifiers and language models
with a value head differ in the class that their configuration names, not in these weights. A
checkpoint without such a layer is refused: a head made up here would reward noise.
"""

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from verl.models.value import load_with_head, score_head

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
