"""Vision-language models: features of images in the place of the embeddings of their tokens.

    tower(image 1), tower(image 2), ...  ->  features  --+
    embedding(ids)  -------------------------------------+-->  language model, packed as text is

Equal images are computed once in a pass, and once in generation while the tower stays as it is. In
exact mode the tower runs one image at a time, in rollout and in training, so an image has the same
features wherever it appears, bit for bit. Where features go is told by whoever placed the image
(`Media.places`). The language model is called with embeddings and never looks for placeholder
tokens itself: one that the model has sampled is a token like others.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from verl.utils.device import without_waiting
from verl.utils.media import Media

MAX_CACHED_BYTES = 1 << 30
PlacedMedia = tuple[Media, np.ndarray, np.ndarray]
"""An image, which of its features are meant, and the tokens that these stand in for."""


@dataclass(frozen=True)
class Family:
    """Where the parts of a kind of model are, below its base model."""

    language: str
    tower: str
    """What `freeze_vision_tower` freezes."""

    projection: str | None = None
    """What joins tower and language model, where it is no part of the tower."""

    image_axis: int = 0
    """Along which the arguments of the tower for several images are joined."""


FAMILIES = {
    "qwen2_vl": Family("language_model", "visual"),
    "qwen2_5_vl": Family("language_model", "visual"),
    "qwen3_vl": Family("language_model", "visual"),
    "idefics3": Family("text_model", "vision_model", "connector", image_axis=1),
}
"""By `model_type` of the configuration."""


def has_vision(config: PretrainedConfig) -> bool:
    """Whether images can be given to a model; of other models that see only the text part runs."""
    return config.model_type in FAMILIES


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model that images are given to; one that is not known is refused by name."""
    if not has_vision(config):
        raise ValueError(
            f"there are images, and {type(config).__name__} (model_type {config.model_type!r}) is "
            f"not among the models that can be given some: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[config.model_type]


def vision_parts(model: PreTrainedModel) -> list[nn.Module]:
    """The tower and what joins it to the language model; none for a model of text."""
    if not has_vision(model.config):
        return []
    family = family_of(model.config)
    names = [family.tower, *([family.projection] if family.projection else [])]
    return [model.base_model.get_submodule(name) for name in names]


def freeze_tower(model: PreTrainedModel) -> None:
    """Do not train the tower; what joins it to the language model, if it is no part of it, is."""
    if not has_vision(model.config):
        raise ValueError(
            f"actor.freeze_vision_tower is True, but {type(model).__name__} has no vision tower; "
            "leave it out"
        )
    model.base_model.get_submodule(family_of(model.config).tower).requires_grad_(False)


@dataclass(frozen=True)
class Features:
    """What the tower makes of one image; (n, hidden) each."""

    embeddings: Tensor
    deepstack: tuple[Tensor, ...] = ()
    """What is added to the hidden states after the first layers (arXiv:2406.04334)."""

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.embeddings, *self.deepstack))

    def copy(self) -> "Features":
        return Features(self.embeddings.clone(), tuple(x.clone() for x in self.deepstack))


@dataclass(frozen=True)
class PlacedFeatures:
    """Features of all images of a pass, and the tokens whose embeddings they replace."""

    index: Tensor
    """(n,) ascending."""

    features: Features

    @classmethod
    def join(cls, parts: Iterable[tuple[Features, np.ndarray, np.ndarray]]) -> "PlacedFeatures":
        """From features, which rows of them are meant, and where these go."""
        ordered = sorted(parts, key=lambda part: int(part[2][0]))
        device = ordered[0][0].embeddings.device
        index = torch.from_numpy(np.concatenate([places for _, _, places in ordered]))
        chosen = [
            features if len(rows) == len(features.embeddings) else take_rows(features, rows)
            for features, rows, _ in ordered
        ]
        stacks = zip(*(one.deepstack for one in chosen), strict=True)
        return cls(
            without_waiting(index, device),
            Features(
                torch.cat([one.embeddings for one in chosen]),
                tuple(torch.cat(stack) for stack in stacks),
            ),
        )


def take_rows(features: Features, rows: np.ndarray) -> Features:
    index = without_waiting(torch.from_numpy(rows), features.embeddings.device)
    return Features(features.embeddings[index], tuple(x[index] for x in features.deepstack))


def features_of(
    model: PreTrainedModel, media: Sequence[Media], *, one_by_one: bool
) -> list[Features]:
    """Run the tower on images, together or each alone; differentiable."""
    if one_by_one and len(media) > 1:
        return [features_of(model, [one], one_by_one=True)[0] for one in media]
    base: Any = model.base_model
    device, axis = next(model.parameters()).device, family_of(model.config).image_axis
    inputs = {
        name: without_waiting(torch.cat([one.inputs[name] for one in media], axis), device)
        for name in media[0].inputs
    }
    output = base.get_image_features(**inputs, return_dict=True)
    embeddings = one_tensor(output.pooler_output)
    deepstack = [one_tensor(x) for x in vars(output).get("deepstack_features") or ()]
    sizes = [len(one.places) for one in media]
    if len(embeddings) != sum(sizes):
        raise ValueError(
            f"{type(model).__name__} makes {len(embeddings)} features of {len(media)} images that "
            f"have {sum(sizes)} tokens; the processor belongs to another model: check "
            "mm_processor_kwargs and the processor's files"
        )
    stacks = zip(*(layer.split(sizes) for layer in deepstack), strict=True)
    stacks = list(stacks) if deepstack else [()] * len(media)
    return [
        Features(part, tuple(stack))
        for part, stack in zip(embeddings.split(sizes), stacks, strict=True)
    ]


def one_tensor(found: Tensor | Sequence[Tensor]) -> Tensor:
    """(n, hidden) from the forms in which models return features."""
    joined = found if isinstance(found, Tensor) else torch.cat(list(found))
    return joined.flatten(0, -2)


def placed_features(
    model: PreTrainedModel, placed: Sequence[PlacedMedia], *, one_by_one: bool = False
) -> PlacedFeatures | None:
    """Features for a training pass, each image once, with gradients where the tower is trained."""
    if not placed:
        return None
    distinct = {media.content_hash: media for media, _, _ in placed}
    found = features_of(model, list(distinct.values()), one_by_one=one_by_one)
    made = dict(zip(distinct, found, strict=True))
    return PlacedFeatures.join((made[m.content_hash], rows, places) for m, rows, places in placed)


class FeatureCache:
    """Features of the images that were seen last, for generation; a change of the tower's weights
    empties it."""

    def __init__(self, model: PreTrainedModel, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self.model = model
        self.max_bytes = max_bytes
        self.num_computed = 0
        self._num_bytes = 0
        self._features: OrderedDict[str, Features] = OrderedDict()
        self._weights = [p for part in vision_parts(model) for p in part.parameters()]
        self._num_writes = -1

    @torch.no_grad()
    def placed(self, placed: Sequence[PlacedMedia], *, one_by_one: bool) -> PlacedFeatures | None:
        """As `placed_features`, without gradients."""
        if not placed:
            return None
        num_writes = sum(weight._version for weight in self._weights)
        if num_writes != self._num_writes:
            self._features.clear()
            self._num_bytes = 0
            self._num_writes = num_writes
        distinct = {media.content_hash: media for media, _, _ in placed}
        missing = [one for name, one in distinct.items() if name not in self._features]
        if missing:
            found = features_of(self.model, missing, one_by_one=one_by_one)
            for one, features in zip(missing, found, strict=True):
                # Of its own: a part of a larger tensor would keep all of it.
                self._features[one.content_hash] = features.copy()
                self._num_bytes += features.num_bytes
            self.num_computed += len(missing)
        for name in distinct:
            self._features.move_to_end(name)
        joined = PlacedFeatures.join(
            (self._features[m.content_hash], rows, places) for m, rows, places in placed
        )
        while self._num_bytes > self.max_bytes:
            _, oldest = self._features.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
        return joined


def language_arguments(
    model: PreTrainedModel, input_ids: Tensor, placed: PlacedFeatures
) -> dict[str, Any]:
    """What the language model is called with in the place of `input_ids`, (1, N)."""
    embeddings = model.get_input_embeddings()(input_ids)
    features = placed.features.embeddings.to(embeddings.dtype)
    arguments: dict[str, Any] = {
        "inputs_embeds": embeddings.index_copy(1, placed.index, features[None])
    }
    if placed.features.deepstack:
        mask = torch.zeros_like(input_ids, dtype=torch.bool)
        mask[:, placed.index] = True
        arguments["visual_pos_masks"] = mask
        arguments["deepstack_visual_embeds"] = list(placed.features.deepstack)
    return arguments


def language_model(model: PreTrainedModel) -> nn.Module:
    """The part that reads embeddings."""
    return model.base_model.get_submodule(family_of(model.config).language)
