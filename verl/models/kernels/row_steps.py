"""What a step of the engine leaves on the device: new tokens, row columns, keys and values. Triton.

`end_step` writes new tokens and their log-probabilities to the next line of a block that the host
reads later, and advances the rows' columns by a token, as `RowTable.advance` does in plain torch:
one launch instead of a dozen. Each row counts its lines; nothing depends on another row.

`write_tokens` copies keys and values of some tokens of a pass to where later steps find them, both
in one launch: gathering and scattering in torch takes four, each with an address per number.
"""

# Types do not know `kernel[grid](...)`.
# pyright: reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
"""Rows of a program."""


@dataclass(frozen=True, eq=False)
class StepRows:
    """The columns that a step changes and those that decide how; int64 tensors (B,), contiguous."""

    newest: Tensor
    num_tokens: Tensor
    token_limit: Tensor
    is_done: Tensor
    """bool"""

    stop_ids: Tensor
    """(B, most stop tokens)"""


@dataclass(frozen=True, eq=False)
class StepBlock:
    """What rows get in a few steps."""

    tokens: Tensor
    """(steps, at least B) int64"""

    log_probs: Tensor
    """(steps, at least B) fp32"""

    num_steps: Tensor
    """Lines that each row has filled; (B,) int64."""


def end_step(tokens: Tensor, log_probs: Tensor, rows: StepRows, block: StepBlock) -> None:
    """Append `tokens` (B,) to the rows that are not done, see which are done now, and keep them.

    Where a block has no line left nothing is kept: capturing a graph runs more steps than a block
    has lines.
    """
    num_rows, num_stops = rows.stop_ids.shape
    _end_step[(triton.cdiv(num_rows, BLOCK),)](
        tokens, log_probs, rows.newest, rows.num_tokens, rows.token_limit,
        rows.is_done.view(torch.uint8), rows.stop_ids,
        block.tokens, block.log_probs, block.num_steps,
        num_rows, len(block.tokens),
        rows.stop_ids.stride(0), block.tokens.stride(0), block.log_probs.stride(0),
        STOPS=num_stops,
        STOPS_PADDED=triton.next_power_of_2(max(num_stops, 1)),
        BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _end_step(
    tokens, log_probs, newest, nums_tokens, token_limits, are_done, stop_ids,
    kept_tokens, kept_log_probs, nums_steps, num_rows, num_lines,
    stop_row, token_line, log_prob_line,
    STOPS: tl.constexpr, STOPS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    token = tl.load(tokens + row, mask=is_row, other=0)
    log_prob = tl.load(log_probs + row, mask=is_row, other=0.0)
    num_steps = tl.load(nums_steps + row, mask=is_row, other=0)
    was_done = tl.load(are_done + row, mask=is_row, other=1) != 0
    num_tokens = tl.load(nums_tokens + row, mask=is_row, other=0) + tl.where(was_done, 0, 1)
    limit = tl.load(token_limits + row, mask=is_row, other=0)
    stop = tl.arange(0, STOPS_PADDED)
    stop_id = tl.load(
        stop_ids + (row * stop_row)[:, None] + stop[None, :],
        mask=is_row[:, None] & (stop < STOPS)[None, :],
        other=-1,
    )
    is_stop = tl.max((stop_id == token[:, None]).to(tl.int32), 1) != 0
    is_done = was_done | is_stop | (num_tokens >= limit)
    # Several threads may load a row's columns: all have, before one of them writes.
    tl.debug_barrier()
    has_line = is_row & (num_steps < num_lines)
    tl.store(kept_tokens + num_steps * token_line + row, token, mask=has_line)
    tl.store(kept_log_probs + num_steps * log_prob_line + row, log_prob, mask=has_line)
    tl.store(nums_steps + row, num_steps + 1, mask=is_row)
    tl.store(newest + row, token, mask=is_row)
    tl.store(nums_tokens + row, num_tokens, mask=is_row)
    tl.store(are_done + row, is_done.to(tl.uint8), mask=is_row)


TOKENS = 32
"""Tokens of one program."""


def write_tokens(
    store: tuple[Tensor, Tensor],
    key: Tensor,
    value: Tensor,
    token: Tensor,
    slot: Tensor,
    position: Tensor,
) -> None:
    """`store[slot[i], :, position[i]]` becomes token `token[i]` of keys and values.

    Those are (N, KV heads, D) each; the store is (slots, KV heads, positions, D) for keys and for
    values. Where two tokens have one target, either may stay.
    """
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    keys, values = store
    assert keys.stride(-1) == values.stride(-1) == 1
    grid = (triton.cdiv(len(token), TOKENS), key.shape[1])
    _write_tokens[grid](
        key, value, keys, values, token, slot, position, len(token),
        *key.stride()[:2], *value.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        KEY_DIM=key.shape[2],
        KEY_PADDED=triton.next_power_of_2(key.shape[2]),
        VALUE_DIM=value.shape[2],
        VALUE_PADDED=triton.next_power_of_2(value.shape[2]),
        TOKENS=TOKENS,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _write_tokens(
    key, value, keys, values, tokens, slots, positions, count,
    k_token, k_head, v_token, v_head,
    ks_slot, ks_head, ks_position, vs_slot, vs_head, vs_position,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    is_row = rows < count
    token = tl.load(tokens + rows, mask=is_row, other=0).to(tl.int64)
    slot = tl.load(slots + rows, mask=is_row, other=0).to(tl.int64)
    position = tl.load(positions + rows, mask=is_row, other=0).to(tl.int64)
    _copy_rows(
        key + token * k_token + head * k_head,
        keys + slot * ks_slot + head * ks_head + position * ks_position,
        is_row, KEY_DIM, KEY_PADDED,
    )  # fmt: skip
    _copy_rows(
        value + token * v_token + head * v_head,
        values + slot * vs_slot + head * vs_head + position * vs_position,
        is_row, VALUE_DIM, VALUE_PADDED,
    )  # fmt: skip


@triton.jit
def _copy_rows(sources, targets, is_row, DIM: tl.constexpr, PADDED: tl.constexpr):
    dim = tl.arange(0, PADDED)
    is_number = is_row[:, None] & (dim < DIM)[None, :]
    numbers = tl.load(sources[:, None] + dim[None, :], mask=is_number)
    tl.store(targets[:, None] + dim[None, :], numbers, mask=is_number)
