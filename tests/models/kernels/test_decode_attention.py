"""One new token per row over slots: the kernel against attention written out in fp64."""

import pytest
import torch

from tests.models.kernels.devices import INTERPRETED, TOLERANCE

PROMPT_TOKENS, RESPONSE_TOKENS = 150, 100
PROMPT_SLOT, SLOT = [0, 0, 5, 0, 3, 3], [3, 8, 1, 0, 4, 2]
NUM_SHARED, PLACE = [140, 140, 0, 140, 33, 33], [0, 70, 99, 5, 64, 1]


def numbers(*shape, device, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def written_out(query, key, value, prompt, response, row, *, scaling, window, softcap, sinks):
    n, place = NUM_SHARED[row], PLACE[row]
    keys, values = (
        torch.cat(
            [shared[PROMPT_SLOT[row]][:, :n], own[SLOT[row]][:, :place], new[row, :, None]], 1
        )
        .double()
        .repeat_interleave(query.shape[1] // key.shape[1], 0)
        for shared, own, new in zip(prompt, response, (key, value), strict=True)
    )
    scores = torch.einsum("hd,htd->ht", query[row].double(), keys) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if window is not None:
        scores[:, : max(0, scores.shape[1] - window)] = -torch.inf
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], 1)
    weights = scores.softmax(-1)[:, : keys.shape[1]]
    return torch.einsum("ht,htd->hd", weights, values)


# The interpreter multiplies the bits of bf16 as if they were integers.
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=INTERPRETED),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("option", ["plain", "window 5", "window 70", "softcap", "sinks"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (4, 4, 80), (8, 2, 16)])
def test_rows_see_their_prompt_and_their_own_tokens(device, dtype, option, heads, kv_heads, dim):
    from verl.models.kernels.decode_attention import SlotRows, slot_decode_attention

    def make(*shape, seed):
        return numbers(*shape, device=device, dtype=dtype, seed=seed)

    prompt = tuple(make(6, kv_heads, PROMPT_TOKENS, dim, seed=seed) for seed in (1, 2))
    response = tuple(make(9, kv_heads, RESPONSE_TOKENS, dim, seed=seed) for seed in (3, 4))
    query = make(heads, len(SLOT), dim, seed=5).transpose(0, 1)  # as models hand it over
    key, value = (make(len(SLOT), kv_heads, dim, seed=seed) for seed in (6, 7))
    window = int(option.split()[1]) if option.startswith("window") else None
    softcap = 3.0 if option == "softcap" else None
    sinks = make(heads, seed=8) if option == "sinks" else None
    expected = torch.stack(
        [
            written_out(
                query, key, value, prompt, response, row,
                scaling=dim**-0.5, window=window, softcap=softcap, sinks=sinks,
            )
            for row in range(len(SLOT))
        ]
    )  # fmt: skip
    columns = (torch.tensor(x, device=device) for x in (PROMPT_SLOT, SLOT, NUM_SHARED, PLACE))
    before = response[0].clone()
    output = slot_decode_attention(
        query, key, value, prompt, response, SlotRows(*columns),
        scaling=dim**-0.5, sliding_window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    assert output.dtype == dtype
    difference = (output.double() - expected).abs().max()
    assert difference <= TOLERANCE[dtype] * expected.abs().max()
    assert torch.equal(response[0][SLOT, :, PLACE], key), "the new keys are kept"
    before[SLOT, :, PLACE] = key
    assert torch.equal(response[0], before), "and nothing else was written"


def attention_of_slots(device, dtype, dim=64, prompt_step=None):
    """A function that runs the kernel; prompt tokens are `prompt_step` numbers apart."""
    from verl.models.kernels.decode_attention import SlotRows, slot_decode_attention

    def make(*shape, seed):
        return numbers(*shape, device=device, dtype=dtype, seed=seed)

    step = prompt_step or dim
    prompt = []
    for seed in (1, 2):
        wide = torch.zeros(6, 2, PROMPT_TOKENS, step, device=device, dtype=dtype)
        wide[..., :dim] = make(6, 2, PROMPT_TOKENS, dim, seed=seed)
        prompt.append(wide[..., :dim])
    response = tuple(make(9, 2, RESPONSE_TOKENS, dim, seed=seed) for seed in (3, 4))
    query, key, value = (make(len(SLOT), h, dim, seed=h) for h in (14, 2, 2))
    columns = [torch.tensor(x, device=device) for x in (PROMPT_SLOT, SLOT, NUM_SHARED, PLACE)]

    def run():
        rows = SlotRows(*columns)
        stores = (prompt[0], prompt[1]), response
        return slot_decode_attention(query, key, value, *stores, rows, scaling=dim**-0.5)

    return run


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_prompts_of_another_step_give_the_same_bits(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    together = attention_of_slots(device, dtype, dim=80)()
    apart = attention_of_slots(device, dtype, dim=80, prompt_step=96)()
    assert torch.equal(together, apart)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_that_overlap_in_a_graph_give_the_bits_of_single_ones(dim, monkeypatch):
    run = attention_of_slots("cuda", torch.bfloat16, dim=dim)
    with monkeypatch.context() as patch:
        patch.setattr("verl.models.kernels.decode_attention.can_start_early", lambda device: False)
        alone = run()
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    for _ in range(10):
        output.zero_()
        graph.replay()
        assert torch.equal(output, alone)


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
