"""How the memory for keys and values is divided: a slot for each sequence, or pages for all.

Slots are used wherever as many as `limits` ask for fit. Where they do not, kernels work on pages:
responses are rarely as long as they may be, so many more sequences run at once. Plain torch reads
slices of the cache, and then runs fewer sequences.
"""

import dataclasses
import logging
from dataclasses import dataclass

from verl.workers.rollout.native.kv_cache import CacheShape
from verl.workers.rollout.native.lockstep import smallest_of_all
from verl.workers.rollout.native.model_runner import ModelRunner
from verl.workers.rollout.native.page_pool import NOBODYS, PAGE, pages_for
from verl.workers.rollout.native.requests import EngineLimits

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """What the cache is made of."""

    shape: CacheShape
    """Of a slot; of a page where `is_paged`, and there is no slot for prompts."""

    num_slots: int
    """Or pages."""

    num_rows: int
    """Sequences that run at once at most."""

    is_paged: bool = False


def slots_that_fit(runner: ModelRunner, limits: EngineLimits) -> CacheSize:
    """As many slots as `limits` ask for, or as fit into their memory; a warning says how many."""
    size = _slots(runner, limits)
    if size.num_slots < limits.max_num_seqs:
        logger.warning(
            "%d sequences run at once instead of rollout.max_num_seqs=%d: each takes %d MiB of "
            "the %d MiB for keys and values",
            size.num_slots,
            limits.max_num_seqs,
            size.shape.bytes_per_sequence >> 20,
            limits.max_cache_bytes >> 20,
        )
    return size


def slots_or_pages(runner: ModelRunner, limits: EngineLimits) -> CacheSize:
    """Slots if all fit, else pages."""
    slots = _slots(runner, limits)
    if slots.num_slots == limits.max_num_seqs:
        return slots
    page = dataclasses.replace(slots.shape, max_prompt_tokens=0, max_response_tokens=PAGE)
    num_pages = limits.max_cache_bytes // page.bytes_per_sequence
    num_pages = smallest_of_all(num_pages, runner.tp_group)
    refuse_too_few_pages(num_pages, limits)
    logger.warning(
        "keys and values of up to %d sequences (rollout.max_num_seqs) share memory for %d tokens, "
        "in pages of %d: enough for %d at full length",
        limits.max_num_seqs,
        num_pages * PAGE,
        PAGE,
        slots.num_slots,
    )
    return CacheSize(shape=page, num_slots=num_pages, num_rows=limits.max_num_seqs, is_paged=True)


def _slots(runner: ModelRunner, limits: EngineLimits) -> CacheSize:
    shape = slot_shape(runner, limits)
    num_slots = smallest_of_all(limits.num_slots(shape.bytes_per_sequence), runner.tp_group)
    return CacheSize(shape=shape, num_slots=num_slots, num_rows=num_slots)


def refuse_too_few_pages(num_pages: int, limits: EngineLimits) -> None:
    longest = limits.max_prompt_tokens + limits.max_response_tokens
    if num_pages - 1 < pages_for(longest):
        raise ValueError(
            f"max_cache_bytes of {limits.max_cache_bytes:,} is {num_pages} pages of {PAGE} tokens, "
            f"of which page {NOBODYS} is not used; one sequence of {limits.max_prompt_tokens} + "
            f"{limits.max_response_tokens} tokens takes {pages_for(longest)}: lower "
            "rollout.prompt_length or rollout.response_length, or raise the memory for the cache "
            "(rollout.gpu_memory_utilization)"
        )


def slot_shape(runner: ModelRunner, limits: EngineLimits) -> CacheShape:
    """A sequence's share, if it has slots."""
    prompt_tokens, response_tokens = limits.max_prompt_tokens, limits.max_response_tokens
    capacity = runner.exact_capacity
    if capacity is not None:
        if capacity < prompt_tokens + response_tokens:
            raise ValueError(
                f"the exact model has capacity {capacity}, but prompt and response may have "
                f"{prompt_tokens + response_tokens} tokens; give make_exact at least that much"
            )
        # Exact attention runs over whole sequences of one length, so they do not share prompts.
        prompt_tokens, response_tokens = 0, capacity
    return CacheShape(
        layers=runner.head_shapes(),
        max_prompt_tokens=prompt_tokens,
        max_response_tokens=response_tokens,
        dtype=runner.dtype,
        device=runner.device,
    )
