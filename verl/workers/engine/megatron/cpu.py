"""What megatron-core takes for granted about CUDA, and what stands in for it without a GPU.

megatron-core asks for the current CUDA device wherever it allocates, waits for it after an exchange
between pipeline stages, and keeps CUDA's random state around recomputation. None of this means
anything on a CPU. `on_this_device` replaces it while the context lasts and only where there is no
GPU. Nothing random is drawn in training on any device: dropout is off and weights are loaded.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor
from torch.overrides import TorchFunctionMode

PLACES: tuple[tuple[Any, str], ...] = (
    (torch.cuda, "current_device"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "current_stream"),
    (torch.cuda, "Stream"),
    (torch.cuda, "stream"),
    (megatron_random, "_get_cuda_rng_state"),
    (megatron_random, "_set_cuda_rng_state"),
    (torch.Tensor, "cuda"),
    (torch.distributed, "all_to_all_single"),
    (torch.distributed, "all_gather"),
    (torch.distributed, "reduce_scatter"),
)


def has_gpu() -> bool:
    return torch.cuda.is_available()


@contextmanager
def on_this_device() -> Iterator[None]:
    """Surrounds every call into megatron-core that builds or runs a model.

    What the library warns of, and is warned of, are calls of its own.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        warnings.filterwarnings("ignore", r"`torch\.distributed", FutureWarning)
        with as_if_on_cuda():
            yield


@contextmanager
def as_if_on_cuda() -> Iterator[None]:
    if has_gpu():
        yield
        return
    before = [(owner, name, getattr(owner, name)) for owner, name in PLACES]
    stands_in: dict[str, Callable[..., Any]] = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: NO_STREAM,
        "Stream": lambda *arguments, **options: NO_STREAM,
        "stream": lambda stream: NO_STREAM,
        "_get_cuda_rng_state": lambda **options: torch.empty(0),
        "_set_cuda_rng_state": lambda state, **options: None,
        "cuda": lambda tensor, *arguments, **options: tensor,
        "all_to_all_single": partial(all_to_all, torch.distributed.all_to_all_single),
        "all_gather": partial(all_gather, torch.distributed.all_gather),
        "reduce_scatter": partial(reduce_scatter, torch.distributed.reduce_scatter),
    }
    for owner, name in PLACES:
        setattr(owner, name, stands_in[name])
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def all_to_all(exchange: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any:
    """Sizes that were copied from a device are numbers; those that never were there are tensors."""
    for name in ("output_split_sizes", "input_split_sizes"):
        if isinstance(options.get(name), Tensor):
            options[name] = options[name].tolist()
    return exchange(*tensors, **options)


def all_gather(
    exchange: Callable[..., Any], parts: list[Tensor], tensor: Tensor, **options: Any
) -> Any:
    """Parts of unequal length travel filled up: gloo exchanges equal ones."""
    longest = max(len(part) for part in parts)
    if all(len(part) == longest for part in parts):
        return exchange(parts, tensor, **options)
    padding = tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])
    filled = [part.new_empty(longest, *part.shape[1:]) for part in parts]
    exchange(filled, torch.cat([tensor, padding]), **options)
    for part, found in zip(parts, filled, strict=True):
        part.copy_(found[: len(part)])
    return None


def reduce_scatter(
    exchange: Callable[..., Any], output: Tensor, parts: list[Tensor], **options: Any
) -> Any:
    if all(len(part) == len(parts[0]) for part in parts):
        return exchange(output, parts, **options)
    whole, group = torch.cat(parts), options.get("group")
    torch.distributed.all_reduce(whole, group=group)
    sizes = [len(part) for part in parts]
    output.copy_(whole.split(sizes)[torch.distributed.get_rank(group)])
    return None


class NoStream:
    """A CUDA stream where there is none: work is done when its call returns."""

    def wait_stream(self, stream: "NoStream") -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> "NoStream":
        return self

    def __enter__(self) -> "NoStream":
        return self

    def __exit__(self, *error: object) -> None: ...


NO_STREAM = NoStream()


class CpuForCuda(TorchFunctionMode):
    """Allocates in CPU memory what is asked for on "cuda", as the pipeline schedules do."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if options.get("device") == "cuda":
            options = {**options, "device": "cpu"}
        return func(*args, **options)


def without_random_state() -> None:
    """No layer draws random numbers, so none is tracked: forks of the tracker do nothing."""
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
