"""How much of a device's memory is in use, and the largest micro-batch that it allows.

`probe_token_budget` runs real passes over rows of the greatest length, one size after the other,
and watches the peak. What is measured is hidden behind `DeviceMemory`, so the search is tested
without a GPU. The passes are the caller's: it throws away their gradients.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict

from verl.utils.device import free_cached_memory, memory_info, synchronize, torch_module_of

logger = logging.getLogger(__name__)

GIB = 1 << 30
STEP = 1.25
"""Each size that is tried is this much larger, or smaller, than the one before."""

USABLE_SHARE = 0.97
"""Fraction of the device's memory; the rest is lost to fragmentation."""

LARGEST_SHARE = 0.9
"""Fraction of the device's memory; the rest is for fragments and memory of other phases."""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What an engine does to need less memory or time, without changing what it computes."""

    optimizer_offload: bool = False
    """Masters and moments wait in CPU memory between optimizer steps."""

    param_offload: bool = False
    """Weights wait in CPU memory between calls. Their addresses change each time, so nobody may
    share them."""

    activation_offload: bool = False
    """What the backward pass needs waits in CPU memory."""

    use_torch_compile: bool = False
    """Norms and MLPs that no kernel fits are compiled, on a GPU."""

    probe_micro_batch: bool = False
    """The first update measures how many tokens fit; micro-batches have that size from then on."""


class DeviceMemory(ABC):
    """The memory that this process and its neighbours use on one device."""

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """What the device has."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Begin a new measurement."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most that was in use since `reset_peak`, by everybody."""


class CudaMemory(DeviceMemory):
    """What torch has allocated, and what the driver says is taken outside of torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch_module_of(device.type)

    @property
    def total_bytes(self) -> int:
        return memory_info(self._device)[1]

    def reset_peak(self) -> None:
        free_cached_memory()
        self._module.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        synchronize(self._device)
        free, total = memory_info(self._device)
        elsewhere = total - free - self._module.memory_reserved(self._device)
        return elsewhere + self._module.max_memory_allocated(self._device)


def has_room(memory: DeviceMemory | None, num_bytes: int) -> bool:
    """Whether passes like those so far would fit beside so many bytes more; yes if unknown."""
    if memory is None:
        return True
    return memory.peak_bytes() + num_bytes <= USABLE_SHARE * memory.total_bytes


def probe_token_budget(
    run_rows: Callable[[int], None],
    memory: DeviceMemory,
    *,
    row_tokens: int,
    start_tokens: int,
    max_tokens: int,
    bytes_to_come: int = 0,
) -> int:
    """The most tokens of a micro-batch that stay within `LARGEST_SHARE` of the memory.

    `run_rows(n)` makes a forward and backward pass over n rows of `row_tokens` tokens, the longest
    there can be. The search begins at `start_tokens` and does not go beyond `max_tokens`;
    `bytes_to_come` is what will be allocated later and stay. At least one row, fitting or not.
    """
    limit = LARGEST_SHARE * memory.total_bytes - bytes_to_come

    def fits(num_rows: int) -> bool:
        memory.reset_peak()
        try:
            run_rows(num_rows)
        except torch.OutOfMemoryError:
            return False
        return memory.peak_bytes() <= limit

    fits(1)  # gradients exist from here on, as in every micro-batch but the first
    most = -(-max_tokens // row_tokens)
    num_rows = max(1, min(start_tokens // row_tokens, most))
    if fits(num_rows):
        while num_rows < most and fits(larger(num_rows, most)):
            num_rows = larger(num_rows, most)
    else:
        num_rows = smaller(num_rows)
        while num_rows > 1 and not fits(num_rows):
            num_rows = smaller(num_rows)
    free_cached_memory()
    logger.warning(  # asked for, so it is shown at the default level
        "micro-batches have up to %d tokens (%d rows of %d) from now on, within %d%% of %.1f GiB; "
        "the configured size is %d tokens",
        num_rows * row_tokens,
        num_rows,
        row_tokens,
        round(100 * LARGEST_SHARE),
        memory.total_bytes / GIB,
        start_tokens,
    )
    return num_rows * row_tokens


def full_rows(data: TensorDict, num_rows: int, vocabulary: int) -> TensorDict:
    """Rows of the greatest length that `data` has room for, each with tokens of its own."""
    L, T = data["input_ids"].shape[1], data["responses"].shape[1]
    ids = (torch.arange(num_rows * L) % vocabulary).view(num_rows, L)
    columns = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(L).expand(num_rows, L),
        "responses": ids[:, L - T :],
        "response_mask": torch.ones(num_rows, T, dtype=torch.long),
    }
    return TensorDict(columns, batch_size=num_rows)  # pyright: ignore[reportArgumentType]


def larger(num_rows: int, most: int) -> int:
    return min(most, max(num_rows + 1, int(num_rows * STEP)))


def smaller(num_rows: int) -> int:
    return max(1, min(num_rows - 1, int(num_rows / STEP)))
