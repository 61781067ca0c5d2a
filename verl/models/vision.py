"""Vision-language models: features of images in the place of the embeddings of their tokens.

    tower(image 1), tower(image 2), ...  ->  features  --+
    embedding(ids)  -------------------------------------+-->  language model, packed as text is

The tower runs one image at a time, in rollout and in training, so an image has the same features
wherever it appears, bit for bit, and equal images are computed once. Where features go is told by
whoever placed the image (`Media.places`). The language model is called with embeddings and never
looks for placeholder tokens itself: one that the model has sampled is a token like others.
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


@dataclass(frozen=True)
class Family:
    """Where the parts of a kind of model are, below its base model."""

    language: str
    tower: str
    """What `freeze_vision_tower` freezes."""

    projection: str | None = None
    """What joins tower and language model, where it is no part of the tower."""

    has_rope_grid: bool = False
    """Whether images have positions in three axes."""


FAMILIES = {
    "qwen2_vl": Family("language_model", "visual", has_rope_grid=True),
    "qwen2_5_vl": Family("language_model", "visual", has_rope_grid=True),
    "qwen3_vl": Family("language_model", "visual", has_rope_grid=True),
    "idefics3": Family("text_model", "vision_model", "connector"),
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


def features_of(model: PreTrainedModel, media: Media) -> Features:
    """Run the tower on one image; differentiable."""
    base: Any = model.base_model
    device = next(model.parameters()).device
    inputs = {name: without_waiting(value, device) for name, value in media.inputs.items()}
    output = base.get_image_features(**inputs, return_dict=True)
    embeddings = one_tensor(output.pooler_output)
    deepstack = vars(output).get("deepstack_features") or ()
    if len(embeddings) != len(media.places):
        raise ValueError(
            f"{type(model).__name__} makes {len(embeddings)} features of an image that has "
            f"{len(media.places)} tokens; the processor belongs to another model: check "
            "mm_processor_kwargs and the processor's files"
        )
    return Features(embeddings, tuple(map(one_tensor, deepstack)))


def one_tensor(found: Tensor | Sequence[Tensor]) -> Tensor:
    """(n, hidden) from the forms in which models return features."""
    joined = found if isinstance(found, Tensor) else torch.cat(list(found))
    return joined.flatten(0, -2)


def placed_features(
    model: PreTrainedModel, placed: Sequence[tuple[Media, np.ndarray, np.ndarray]]
) -> PlacedFeatures | None:
    """Features for a training pass, each image once, with gradients where the tower is trained.

    `placed` says which of an image's features are meant and where they go.
    """
    if not placed:
        return None
    made: dict[str, Features] = {}
    for media, _, _ in placed:
        if media.content_hash not in made:
            made[media.content_hash] = features_of(model, media)
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
    def placed(
        self, placed: Sequence[tuple[Media, np.ndarray, np.ndarray]]
    ) -> PlacedFeatures | None:
        """As `placed_features`, without gradients."""
        if not placed:
            return None
        num_writes = sum(weight._version for weight in self._weights)
        if num_writes != self._num_writes:
            self.clear()
            self._num_writes = num_writes
        joined = PlacedFeatures.join((self._of(m), rows, places) for m, rows, places in placed)
        while self._num_bytes > self.max_bytes:
            _, oldest = self._features.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
        return joined

    def clear(self) -> None:
        self._features.clear()
        self._num_bytes = 0

    def _of(self, media: Media) -> Features:
        features = self._features.get(media.content_hash)
        if features is None:
            features = self._features[media.content_hash] = features_of(self.model, media)
            self._num_bytes += features.num_bytes
            self.num_computed += 1
        self._features.move_to_end(media.content_hash)
        return features


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
