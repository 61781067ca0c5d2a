"""One new token per row over pages: bit for bit what slots give."""

import pytest
import torch

from tests.models.kernels.devices import INTERPRETED
from tests.models.kernels.test_decode_attention import (
    NUM_SHARED,
    PLACE,
    PROMPT_SLOT,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    SLOT,
    numbers,
)

BLOCK, NUM_PAGES = 64, 40
NUM_BLOCKS = -(-(PROMPT_TOKENS + RESPONSE_TOKENS) // BLOCK)


def cut_into_pages(prompt, response):
    """Pages in random order, and the table of them; whole blocks of a prompt are kept once.

    Pages that no row holds are full of NaN: whoever reads one shows it.
    """
    order = iter(torch.randperm(NUM_PAGES - 1, generator=torch.Generator().manual_seed(9)) + 1)
    table = torch.zeros(9, NUM_BLOCKS, dtype=torch.int32)
    stores = [x.new_full((NUM_PAGES, x.shape[1], BLOCK, x.shape[3]), torch.nan) for x in prompt]
    page_of = {}
    for row, slot in enumerate(SLOT):
        n, num_own = NUM_SHARED[row], PLACE[row] + 1
        for block in range(-(-(n + num_own) // BLOCK)):
            is_shared = (block + 1) * BLOCK <= n
            key = (PROMPT_SLOT[row] if is_shared else f"row {row}", block)
            if key not in page_of:
                page_of[key] = int(next(order))
            page = table[slot, block] = page_of[key]
            for store, shared, own in zip(stores, prompt, response, strict=True):
                whole = torch.cat([shared[PROMPT_SLOT[row]][:, :n], own[slot][:, :num_own]], 1)
                tokens = whole[:, block * BLOCK : (block + 1) * BLOCK]
                store[page, :, : tokens.shape[1]] = tokens
    return tuple(stores), table


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=INTERPRETED),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("option", ["plain", "window 70", "softcap", "sinks"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (4, 2, 128)])
def test_pages_give_the_bits_of_slots(device, dtype, option, heads, kv_heads, dim):
    from verl.models.kernels.decode_attention import SlotRows, slot_decode_attention

    def make(*shape, seed):
        return numbers(*shape, device=device, dtype=dtype, seed=seed)

    prompt = tuple(make(6, kv_heads, PROMPT_TOKENS, dim, seed=seed) for seed in (1, 2))
    response = tuple(make(9, kv_heads, RESPONSE_TOKENS, dim, seed=seed) for seed in (3, 4))
    stores, table = cut_into_pages(prompt, response)
    before = stores[1].clone()
    query = make(heads, len(SLOT), dim, seed=5).transpose(0, 1)
    key, value = (make(len(SLOT), kv_heads, dim, seed=seed) for seed in (6, 7))
    columns = [torch.tensor(x, device=device) for x in (PROMPT_SLOT, SLOT, NUM_SHARED, PLACE)]
    options = {
        "scaling": dim**-0.5,
        "sliding_window": 70 if option == "window 70" else None,
        "softcap": 3.0 if option == "softcap" else None,
        "sinks": make(heads, seed=8) if option == "sinks" else None,
    }
    expected = slot_decode_attention(
        query, key, value, prompt, response, SlotRows(*columns), **options
    )
    rows = SlotRows(*columns, pages=table.to(device))
    found = slot_decode_attention(query, key, value, stores, stores, rows, **options)
    assert torch.equal(found, expected)
    positions = [n + place for n, place in zip(NUM_SHARED, PLACE, strict=True)]
    pages = [int(table[s, p // BLOCK]) for s, p in zip(SLOT, positions, strict=True)]
    before[pages, :, [p % BLOCK for p in positions]] = value
    assert torch.equal(stores[1].nan_to_num(), before.nan_to_num()), "only the new value is written"
