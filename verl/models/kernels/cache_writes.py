"""Keys and values of some tokens of a pass, copied to where later steps find them. Triton.

One launch for both: gathering and scattering in torch takes four, each with an address per number.
"""

# Types do not know `kernel[grid](...)`.
# pyright: reportIndexIssue=false

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 32
"""Of a program."""


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
    values. Where two tokens go to one place, either may stay.
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
