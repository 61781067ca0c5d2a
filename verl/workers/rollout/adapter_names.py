"""How the tensors of a LoRA adapter are named on their way from training into an engine.

A model under training calls them `layer.lora_A.default.weight`; peft's files, which engines read,
say `base_model.model.layer.lora_A.weight`. Runs on both sides, so it needs torch alone.
"""

from collections.abc import Iterable, Iterator

from torch import Tensor

PEFT_PREFIX = "base_model.model."

NamedTensors = Iterable[tuple[str, Tensor]]


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def without_adapters(weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """The same, but refuses tensors of an adapter: an engine would silently ignore them."""
    for name, tensor in weights:
        if is_adapter(name):
            raise ValueError(
                f"the update has {name}, which belongs to a LoRA adapter, but this engine was "
                "started without one; send merged weights, or start it with `adapter`"
            )
        yield name, tensor


def in_peft_format(weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Tensors of an adapter under the names of peft's files; refuses any other."""
    for name, tensor in weights:
        if not is_adapter(name):
            raise ValueError(
                f"the update has {name}, but this engine was started with a LoRA adapter and takes "
                "the adapter's tensors alone"
            )
        name = PEFT_PREFIX + name.removeprefix(PEFT_PREFIX)
        for matrix in ("lora_A", "lora_B"):
            name = name.replace(f".{matrix}.default.weight", f".{matrix}.weight")
        yield name, tensor
