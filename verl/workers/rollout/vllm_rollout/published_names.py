"""Weights under the names and in the shapes of the published checkpoint, one tensor at a time.

A Hugging Face module may hold weights in another form than the files it was loaded from: the
experts of a layer, for instance, are one tensor in the module and two or three per expert in the
files. The trainer sends what the module holds; engines read what the files hold. Transformers knows
the way back, since saving a model takes it.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

Weights = Iterable[tuple[str, Tensor]]


def published_form(
    model_path: str, *, trust_remote_code: bool = False
) -> Callable[[Weights], Iterator[tuple[str, Tensor]]]:
    """A function that turns a module's weights into those of its files.

    A model whose code is not part of transformers is taken to have no other form.
    """
    config = transformers.AutoConfig.from_pretrained(
        model_path, trust_remote_code=trust_remote_code
    )
    architecture = (config.architectures or [""])[0]
    if architecture not in dir(transformers):
        return iter
    with torch.device("meta"):
        skeleton = getattr(transformers, architecture)(config)

    def convert(weights: Weights) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            yield from revert_weight_conversion(skeleton, {name: tensor}).items()

    return convert
