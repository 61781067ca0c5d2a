"""Bring Hugging Face models into the state that training and rollout share: policy, critic, reward.

One module, our attention, no dropout, parameters in one dtype. What a model does that we cannot
honour (state outside attention, an output layer that is not linear) is refused here, by name.

A critic or a reward model is the transformer of a causal language model and a linear layer `score`
with one output, which gives one number per token. A critic's checkpoint that has such a layer keeps
it; otherwise it starts at zero, so that a fresh critic predicts 0 everywhere instead of noise. The
score of a text is what a reward model's layer reads at the last token. Sequence classifiers, token
classifiers and language models with a value head differ in the class that their configuration
names, not in these weights. A reward model without such a layer is refused: a random head would
reward noise.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from verl.config.faults import ConfigError, Fault
from verl.config.model import rope_faults
from verl.models.attention import ATTENTION
from verl.models.experts import prepare_experts, set_aux_loss
from verl.models.head import OutputHead
from verl.models.vision import has_vision
from verl.utils.environment import BadData, memory_hint

ROPE = ("rope_scaling", "rope_parameters", "rope_theta")
CACHE_LINE = 64  # bytes; torch's own tensors begin at one


class BadModel(BadData, ValueError):
    """A folder or a name that gives no model of the kind that is needed."""


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    override_config: dict[str, object] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load the model at `path` (a folder or a hub name) with its weights, ready to be packed."""
    config = read_config(path, override_config, trust_remote_code)
    with reading(path):
        model, loading = auto_class(config).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention_of(config),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    refuse_missing(loading["missing_keys"], path, model)
    set_aux_loss(prepare(model), override_config)
    return model.to(device)  # pyright: ignore[reportArgumentType]


def empty_causal_lm(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    override_config: dict[str, object] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model at `path` on the meta device: everything but its weights, which are not read."""
    config = read_config(path, override_config, trust_remote_code)
    with torch.device("meta"):
        model = auto_class(config).from_config(
            config,
            dtype=dtype,
            attn_implementation=attention_of(config),
            trust_remote_code=trust_remote_code,
        )
    return set_aux_loss(prepare(model), override_config)


def read_config(
    path: str, override_config: dict[str, object] | None, trust_remote_code: bool, **changes: object
) -> PretrainedConfig:
    """The model's own configuration with the user's changes; attention is always ours.

    What is stated of RoPE (`rope_scaling`, `rope_theta`) is added to what the model has.
    """
    with reading(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **changes)
    names = {*config.to_dict(), *config.attribute_map, *ROPE, "attn_implementation"}
    for key, value in (override_config or {}).items():
        if key not in names:
            close = get_close_matches(key, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            text = f"override_config.{key}: {type(config).__name__} has no such value{hint}"
            raise ConfigError([Fault(text, (f"override_config.{key}",))])
        if key in ROPE:
            stated = {"rope_theta": value} if key == "rope_theta" else dict(cast(Any, value) or {})
            wrong = list(rope_faults(stated, config.rope_parameters))
            if wrong:
                raise ConfigError([Fault(f"override_config.{key}.{text}") for text in wrong])
            if "type" in stated:  # the older spelling
                stated["rope_type"] = stated.pop("type")
            config.rope_parameters = {**config.rope_parameters, **stated}
        elif key != "attn_implementation":
            setattr(config, key, value)
    return config


@contextmanager
def reading(path: str) -> Iterator[None]:
    """What transformers cannot read is named by its folder; a lack of memory is none of these."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if memory_hint(error) is not None:
            raise
        raise BadModel(f"the model at {path} cannot be loaded: {error}") from error


def refuse_missing(names: Iterable[str], path: str, model: PreTrainedModel) -> None:
    """transformers draws weights that a checkpoint lacks at random, and only warns."""
    missing = sorted(names)
    if missing:
        raise BadModel(
            f"the model at {path} lacks {len(missing)} weights of a {type(model).__name__} "
            f"({', '.join(missing[:3])}{', ...' * (len(missing) > 3)}), which would be random "
            "numbers; give a folder with all weights of a language model"
        )


def random_causal_lm(
    config: PretrainedConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """Build a model of that shape with random weights, ready to be packed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class(config).from_config(
            deepcopy(config), dtype=dtype, attn_implementation=attention_of(config)
        )
    return prepare(model)


def auto_class(config: PretrainedConfig) -> Any:
    """Who builds a model that writes text, whether it sees or not."""
    return AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM


def attention_of(config: PretrainedConfig) -> Any:
    """Ours for language; a vision tower, whose tokens all see each other, has torch's."""
    if not has_vision(config):
        return ATTENTION
    return {"": ATTENTION, "text_config": ATTENTION, "vision_config": "sdpa"}


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Ready to be packed, with an output layer that training can compute in chunks."""
    prepare_layers(model)
    OutputHead.of(model)
    return model


def prepare_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Turn dropout off, align the weights and refuse what packed training cannot honour."""
    refuse_state_outside_attention(model)
    disable_dropout(model)
    align_weights(model)
    prepare_experts(model)
    return model.eval()


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: a random mask in one of two passes makes their ratio wrong."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if "attention_dropout" in vars(module):
            vars(module)["attention_dropout"] = 0.0


def align_weights(model: nn.Module) -> None:
    """Have every weight begin at a cache line.

    In a mapped file it begins anywhere, and on some CPUs the last bits of a product depend on that:
    training would give other bits than after the weights have been moved or reloaded.
    """
    for weight in [*model.parameters(), *model.buffers()]:
        if weight.data_ptr() % CACHE_LINE:
            weight.data = weight.data.clone()


def refuse_state_outside_attention(model: PreTrainedModel) -> None:
    """Every layer must mix tokens through attention alone; recurrent or convolving ones do not."""
    config = model.config.get_text_config()
    kinds = set(config.to_dict().get("layer_types") or ["full_attention"])
    foreign = kinds - {"full_attention", "sliding_attention", "chunked_attention", "attention"}
    num_layers = config.num_hidden_layers
    attention = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    if foreign or len(attention) < num_layers:
        raise BadModel(
            f"{type(model).__name__} keeps state outside attention "
            f"({', '.join(sorted(foreign)) or 'no attention in some layers'}); "
            "packed training and the built-in engine support attention-only models"
        )


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
    kind = AutoModelForTokenClassification
    return empty_with_head(kind, path, dtype, override_config, trust_remote_code)


def empty_with_head(
    kind: Any,
    path: str,
    dtype: torch.dtype,
    override_config: dict[str, object] | None,
    trust_remote_code: bool,
) -> PreTrainedModel:
    with torch.device("meta"):
        model = kind.from_config(
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
    config = read_config(path, override_config, trust_remote_code, num_labels=1)
    with reading(path):
        model, loading = auto_class.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **options,
        )
    missing = set(loading["missing_keys"])
    refuse_missing(missing - {"score.weight", "score.bias"}, path, model)
    if "score.bias" in missing:
        nn.init.zeros_(score_head(model).bias)
    return prepare_layers(model), missing


def zero_head(model: PreTrainedModel) -> None:
    for parameter in score_head(model).parameters():
        nn.init.zeros_(parameter)


def score_head(model: PreTrainedModel) -> nn.Linear:
    head = dict(model.named_children()).get("score")
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise BadModel(
            f"{type(model).__name__} has no linear layer `score` with one output; "
            "a value model needs one (AutoModelForTokenClassification with num_labels=1)"
        )
    return head


def load_scoring_model(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    override_config: dict[str, object] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A reward model to train: a classifier keeps its head, a language model gets one that says 0.

    The latter becomes a sequence classifier with one label.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {
        "dtype": dtype,
        "override_config": override_config,
        "trust_remote_code": trust_remote_code,
    }
    if any(name.endswith("Classification") for name in config.architectures or []):
        return load_reward_model(path, device=device, **options)
    model, missing = load_with_head(AutoModelForSequenceClassification, path, **options)
    if "score.weight" in missing:
        zero_head(model)
    return model.to(device)  # pyright: ignore[reportArgumentType]


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
    model, missing = load_with_head(
        reward_class(path, trust_remote_code),
        path,
        dtype=dtype,
        override_config=override_config,
        trust_remote_code=trust_remote_code,
        key_mapping=VALUE_HEAD,
    )
    score_head(model)
    lacking = sorted(missing - {"score.bias"})
    if lacking:
        raise BadModel(
            f"reward_model.model.path={path} has no {', '.join(lacking[:5])}; a reward model is a "
            "sequence or token classifier with one label, or a language model with a value head. "
            "verl.trainer.main_rm trains one"
        )
    return model.to(device)  # pyright: ignore[reportArgumentType]


def empty_reward_model(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    override_config: dict[str, object] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The same on the meta device: everything but its weights, which are not read."""
    kind = reward_class(path, trust_remote_code)
    return empty_with_head(kind, path, dtype, override_config, trust_remote_code)


def reward_class(path: str, trust_remote_code: bool) -> Any:
    """What the configuration names; a classifier with several labels is refused."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    kinds = [name.rpartition("For")[2] for name in config.architectures or []]
    if any(kind.endswith("Classification") for kind in kinds) and config.num_labels != 1:
        raise BadModel(
            f"reward_model.model.path={path} is a classifier with {config.num_labels} labels; a "
            "reward model has one output, the score: train it with num_labels=1"
        )
    is_sequence = "SequenceClassification" in kinds
    return AutoModelForSequenceClassification if is_sequence else AutoModelForTokenClassification
