"""Low-rank adapters (arXiv:2106.09685): put into a model, trained, stored, merged.

    y = W x + (alpha / rank) B A x        A random, B zero, so training starts from the base model

peft replaces linear layers in place by layers that hold the linear one and, by name, any number of
adapters. Here there is one that is trained, and beside it a frozen copy of the adapter that a run
started from, if it started from one. The model can run without adapters or as it started.

On disk an adapter is a folder in peft's format, which `PeftModel.from_pretrained` loads:

    adapter_config.json          rank, scaling, which layers
    adapter_model.safetensors    the adapters' weights, and a value model's head

Only plain LoRA is read: a variant that computes something else, or that changes the base weights,
would silently be another model here. Merging computes W + scale B A in fp32 and rounds once.
"""

import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.config.base import BaseConfig
from verl.config.critic import FSDPCriticModelCfg
from verl.config.model import HFModelConfig
from verl.models.expert_adapters import (
    EXPERTS_TARGET,
    adapted_weight,
    attach,
    expert_tensors,
    is_expert_layer,
    merge_experts,
)
from verl.models.experts import prepare_experts
from verl.models.routing import Routing
from verl.models.vision import vision_parts
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import require
from verl.utils.user_files import read_json_object

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"
NAME = re.compile(r"[\w.]+")
NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """The form of the adapters; `adapter_path` brings its own, and the rest must not contradict."""

    rank: int = 0
    """0 only with `adapter_path`."""

    alpha: int = 16
    use_rslora: bool = False
    """Scale by `alpha / sqrt(rank)` (arXiv:2312.03732) instead of `alpha / rank`."""

    target_modules: str | list[str] = ALL_LINEAR
    """Layers that get an adapter: names, a regular expression, or `all-linear`. Among names,
    `experts` are the tensors of all experts, and with them `all-linear` are those of attention."""

    exclude_modules: str | list[str] | None = None
    adapter_path: str | None = None
    """Start from this adapter instead of a new one."""


def lora_options(model: BaseConfig) -> LoraOptions | None:
    """What the configuration of a model asks for; None trains all weights."""
    if isinstance(model, HFModelConfig):
        rank = model.lora_rank or model.lora.rank
        if not rank and model.lora_adapter_path is None:
            return None
        return LoraOptions(
            rank=rank,
            alpha=model.lora_alpha,
            use_rslora=model.use_rslora,
            target_modules=names_or_pattern(model.target_modules),
            exclude_modules=names_or_pattern(model.exclude_modules or []) or None,
            adapter_path=model.lora_adapter_path,
        )
    if isinstance(model, FSDPCriticModelCfg) and model.lora_rank:
        return LoraOptions(
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            target_modules=names_or_pattern(model.target_modules),
        )
    return None


def names_or_pattern(modules: str | list[str]) -> str | list[str]:
    """A list of names as it is; of a text, the names in it unless it is a regular expression."""
    if not isinstance(modules, str):
        return [str(name) for name in modules]
    if modules.lower() == ALL_LINEAR:
        return ALL_LINEAR
    names = [name.strip() for name in modules.split(",")]
    is_list = all(NAME.fullmatch(name) or name == ALL_LINEAR for name in names)
    return names if is_list else modules


ADAPTER = "default"
"""The name of the adapter that is trained; peft's own default."""

START = "start"
"""The name of the frozen copy of the adapter that training started from."""

HEAD = "score"
"""The layer of a value model that has one output; it starts at zero and is trained whole."""


def inject(model: PreTrainedModel, config: Any, *, seed: int, name: str = ADAPTER) -> None:
    """Freeze `model` and give it fresh adapters, in place; the same ones for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            require("peft", "peft").inject_adapter_in_model(config, model, adapter_name=name)
        except ValueError as error:  # no layer has such a name
            raise ValueError(f"target_modules: {error}") from error
    refuse_unknown_layers(model)
    attach(lora_layers(model))


def fresh_config(model: PreTrainedModel, options: LoraOptions) -> Any:
    """peft's configuration of new adapters."""
    is_value_model = model.get_output_embeddings() is None
    modules, parameters = targets(model, options.target_modules)
    return require("peft", "peft").LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        use_rslora=options.use_rslora,
        target_modules=modules,
        target_parameters=parameters,
        exclude_modules=[HEAD] if is_value_model else excluded(model, options),
        task_type="TOKEN_CLS" if is_value_model else "CAUSAL_LM",
        base_model_name_or_path=model.config.name_or_path,
    )


def excluded(model: PreTrainedModel, options: LoraOptions) -> str | list[str] | None:
    """What gets no adapter: the user's wish, and the parts of a model that see. A regular
    expression in `target_modules` may name these."""
    names, unwanted = options.target_modules, options.exclude_modules
    is_pattern = isinstance(names, str) and names != ALL_LINEAR
    seeing = {id(module) for part in vision_parts(model) for module in part.modules()}
    if is_pattern or not seeing:
        return unwanted
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in seeing
    ]
    if isinstance(unwanted, str):
        return "|".join([f"(?:{unwanted})", *map(re.escape, linears)])
    return [*(unwanted or []), *linears]


def targets(
    model: PreTrainedModel, target_modules: str | list[str]
) -> tuple[str | list[str], list[str] | None]:
    """What gets an adapter as peft takes it: linear layers, and tensors of experts by name.

    Of a model with experts, `all-linear` are the layers of its attention. peft takes the names of
    MLPs for those of experts (and gives gate and up a common, doubled rank), which is refused:
    `experts` names them. Routers stay frozen.
    """
    names = [ALL_LINEAR] if target_modules == ALL_LINEAR else target_modules
    if isinstance(names, str):
        return names, None
    if Routing.of(model) is None:
        if EXPERTS_TARGET in names:
            raise ValueError(
                f"target_modules names {EXPERTS_TARGET!r}, but {type(model).__name__} has none: "
                f"name its linear layers, or {ALL_LINEAR}"
            )
        return target_modules, None
    inside = [name for name in names if name.rpartition(".")[2] in NAMES_OF_EXPERTS]
    if inside:
        raise ValueError(
            f"target_modules names {inside[0]!r}, but experts are tensors of a whole layer and not "
            f"linear layers: name {EXPERTS_TARGET!r}, which gives every expert adapters of its own"
        )
    modules = [name for name in names if name not in (ALL_LINEAR, EXPERTS_TARGET)]
    if ALL_LINEAR in names:
        modules += [name for name in attention_layers(model) if name not in modules]
    if EXPERTS_TARGET in names:
        return modules, expert_tensors(model)
    logger.warning("adapters go on %s; experts and routers stay frozen", ", ".join(modules))
    return modules, None


def attention_layers(model: PreTrainedModel) -> list[str]:
    """The linear layers of a model with experts that peft does not take for experts."""
    head = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and name != HEAD
    ]
    names = [name for name in names if name.rpartition(".")[2] not in NAMES_OF_EXPERTS]
    return sorted({".".join(name.split(".")[-2:]) for name in names})


def train_head(model: PreTrainedModel) -> None:
    """Let a value model's head learn too; peft's files say so in their own way."""
    if model.get_output_embeddings() is None:
        model.get_submodule(HEAD).requires_grad_(True)
        peft_config(model).modules_to_save = [HEAD]


def refuse_unknown_layers(model: PreTrainedModel) -> None:
    """Adapters go on linear layers inside the model and on experts; its output layer stays."""
    for name, layer in lora_layers(model).items():
        if not is_expert_layer(layer) and not isinstance(layer.get_base_layer(), nn.Linear):
            raise ValueError(
                f"target_modules puts an adapter on {name}, which is "
                f"{type(layer.get_base_layer()).__name__}; only linear layers and experts can have "
                "one: name them in target_modules, for example [q_proj,k_proj,v_proj,o_proj]"
            )
        if layer is model.get_output_embeddings():
            raise ValueError(
                f"target_modules puts an adapter on {name}, the output layer, whose weight is "
                f"read directly; leave it out ({ALL_LINEAR} does)"
            )


def has_lora(model: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_" in name


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers by name."""
    kind = require("peft.tuners.lora", "peft").LoraLayer
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, kind)}


def peft_config(model: nn.Module) -> Any:
    """What peft left on the model it changed."""
    return vars(model)["peft_config"][ADAPTER]


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Run as the base model while the context lasts; no change when there are no adapters."""
    with _running_as(model, None):
        yield


@contextmanager
def as_started(model: nn.Module) -> Iterator[None]:
    """Run as the policy that training started from: the base, or with the adapter it came with."""
    is_kept = any(f".{START}." in name for name, _ in model.named_parameters())
    with _running_as(model, START if is_kept else None):
        yield


@contextmanager
def _running_as(model: nn.Module, adapter: str | None) -> Iterator[None]:
    if not has_lora(model):
        yield
        return
    layers = list(lora_layers(model).values())
    # peft lets what it switches on be trained, and freezes what it switches off.
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for layer in layers:
            if adapter is None:
                layer.enable_adapters(False)
            else:
                layer.set_adapter(adapter)
        yield
    finally:
        for layer in layers:
            layer.set_adapter(ADAPTER)
            layer.enable_adapters(True)
        model.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)


ADAPTER_FOLDER = "lora_adapter"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
FORM = (
    "r", "lora_alpha", "use_rslora", "target_modules", "target_parameters", "exclude_modules",
    "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
)  # fmt: skip
"""What decides where adapters are and how large."""

WITHOUT_MEANING = (
    "task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping",
    "peft_version", "init_lora_weights", "lora_dropout",
)  # fmt: skip
"""What says nothing about a trained adapter without dropout."""

INITIALISATIONS_THAT_LEAVE_THE_BASE = (True, False, "gaussian")


def adapter_weights(
    model: nn.Module, parameters: Iterable[tuple[str, Tensor]] | None = None
) -> dict[str, Tensor]:
    """What is trained beside the base weights, under the names that peft gives it on disk.

    `parameters` are the model's own by name; give them where the model holds only shards.
    """
    heads = tuple(f"{name}." for name in peft_config(model).modules_to_save or ())
    return {
        f"{PEFT_PREFIX}{name.replace(f'.{ADAPTER}', '')}": parameter.detach()
        for name, parameter in parameters or model.named_parameters()
        if (is_adapter(name) and f".{ADAPTER}." in name) or name.startswith(heads)
    }


def save_adapter(
    model: PreTrainedModel,
    folder: str | Path,
    parameters: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained(base, folder)` loads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = deepcopy(peft_config(model))
    config.inference_mode = True
    config.save_pretrained(str(folder))
    weights = adapter_weights(model, parameters)
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    (folder / WEIGHTS_FILE).write_bytes(save(weights, metadata={"format": "pt"}))


@torch.no_grad()
def load_adapter(model: PreTrainedModel, folder: str | Path) -> None:
    """Copy the adapter in `folder` into the model's own, in place; they must have the same form."""
    file = Path(folder).expanduser() / WEIGHTS_FILE
    stored, own = load_file(file), adapter_weights(model)
    wrong = [
        f"{name} is {shape_of(stored, name)} there and {shape_of(own, name)} here"
        for name in sorted(stored.keys() | own.keys())
        if shape_of(stored, name) != shape_of(own, name)
    ]
    if wrong:
        raise ValueError(
            f"the adapter in {file} does not fit: {'; '.join(wrong[:4])}; set lora_rank and "
            "target_modules as they are in its adapter_config.json"
        )
    for name, weight in own.items():
        weight.copy_(stored[name])


def shape_of(weights: dict[str, Tensor], name: str) -> str:
    return str(list(weights[name].shape)) if name in weights else "missing"


def stored_config(folder: str | Path, options: LoraOptions) -> Any:
    """The form of the adapter in `folder`; an error if it is not plain LoRA, or has another rank
    than `options` asks for."""
    folder = Path(folder).expanduser()
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"lora_adapter_path is {folder}, which has no {' and no '.join(missing)}; it must be a "
            "local folder that peft has saved with safetensors"
        )
    read_json_object(folder / CONFIG_FILE)  # names it where it is broken
    kind = require("peft", "peft").LoraConfig
    stored = kind.from_pretrained(str(folder))
    refuse_variants(stored, kind(), folder)
    if options.rank not in (0, stored.r):
        raise ValueError(
            f"lora_rank is {options.rank}, but the adapter in {folder} has rank {stored.r}; leave "
            "lora_rank out to take the adapter's"
        )
    if stored.lora_dropout:
        logger.warning("%s was trained with dropout; it continues without", folder)
    form = {name: vars(stored)[name] for name in FORM}
    return kind(**form, task_type="CAUSAL_LM")


def refuse_variants(stored: Any, plain: Any, folder: Path) -> None:
    """`stored` and `plain` are peft configurations; `plain` is one that nobody has changed."""
    odd = [
        f"{name}={value!r}"
        for name, value in vars(stored).items()
        if name not in (*FORM, *WITHOUT_MEANING) and value != vars(plain)[name]
    ]
    if stored.init_lora_weights not in INITIALISATIONS_THAT_LEAVE_THE_BASE:
        odd.append(f"init_lora_weights={stored.init_lora_weights!r}")
    if odd:
        raise ValueError(
            f"the adapter in {folder} is more than plain LoRA ({', '.join(odd)}); merge it into "
            "its base model with peft and start from the merged model"
        )


BASE = ".base_layer"


@torch.no_grad()
def hf_weights(
    model: nn.Module, parameters: Iterable[tuple[str, Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its Hugging Face name, adapters merged; one at a time.

    `parameters` are the model's own by name, in any order; give them where the model holds only
    shards. What has no adapter is passed on as it is.
    """
    parameters = parameters or model.named_parameters()
    if not has_lora(model):
        yield from parameters
        return
    layers = lora_layers(model)
    adapted = {weight_name(name, layer): name for name, layer in layers.items()}
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in layers}
    bases = {layer: name.replace(BASE, "") for name, layer in adapted.items()}
    for name, weight in parameters:
        if is_adapter(name):
            layer, _, part = name.partition(".lora_")
            if f".{ADAPTER}." not in name:
                continue  # a frozen one
            parts[layer][part[0]] = weight
        elif name in adapted:
            layer = adapted[name]
            parts[layer]["W"] = weight
        else:
            yield name.replace(BASE, ""), weight
            continue
        if len(parts[layer]) == 3:
            yield bases[layer], merge(layers[layer], **parts.pop(layer))


def weight_name(name: str, layer: Any) -> str:
    """The full name of the weight that the layer of this name adapts."""
    return adapted_weight(name, layer) if is_expert_layer(layer) else f"{name}{BASE}.weight"


def merge(layer: Any, *, W: Tensor, A: Tensor, B: Tensor) -> Tensor:
    scale = layer.scaling[ADAPTER]
    if is_expert_layer(layer):
        return merge_experts(layer, W=W, A=A, B=B, scale=scale)
    return (W.float() + scale * (B.float() @ A.float())).to(W.dtype)


@torch.no_grad()
def merged_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A plain model with every adapter added to its weight; what has none shares its storage."""
    weights = dict(hf_weights(model, model.state_dict().items()))
    with torch.device("meta"):
        copy = type(model)(deepcopy(model.config))
    copy.load_state_dict(weights, assign=True)
    for name, buffer in model.named_buffers():  # a state has none that can be computed anew
        owner, _, leaf = name.replace(BASE, "").rpartition(".")
        copy.get_submodule(owner)._buffers[leaf] = buffer
    copy.tie_weights()
    if model.can_generate():
        copy.generation_config = model.generation_config
    prepare_experts(copy)
    return copy.eval()


def add_lora(
    model: PreTrainedModel, options: LoraOptions, *, seed: int = 0, keeps_start: bool = False
) -> PreTrainedModel:
    """Freeze `model` and give it adapters to train, in place: new ones, or those stored.

    `keeps_start` keeps a frozen copy of the stored adapter, for `as_started`; new adapters need
    none, because they start as nothing.
    """
    if options.adapter_path is None:
        inject(model, fresh_config(model, options), seed=seed)
        train_head(model)
        return model.eval()
    folder = copy_to_local(options.adapter_path)
    config = stored_config(folder, options)
    config.base_model_name_or_path = model.config.name_or_path
    inject(model, config, seed=seed)
    load_adapter(model, folder)
    if keeps_start:
        keep_start(model)
    return model.eval()


def keep_start(model: PreTrainedModel) -> None:
    """Add a frozen copy of the adapter as it is now."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # a second is meant
        inject(model, deepcopy(peft_config(model)), seed=0, name=START)
    for layer in lora_layers(model).values():
        for factor in (layer.lora_A, layer.lora_B):
            factor[START] = deepcopy(factor[ADAPTER])
        layer.set_adapter(ADAPTER)  # peft runs and trains the last one that was added
