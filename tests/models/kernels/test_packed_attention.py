"""Sequences end to end, with and without a shared prompt: the kernel against fp64, written out."""

import pytest
import torch

from tests.models.kernels.devices import INTERPRETED, TOLERANCE

# [prompt of 70 | prompt of 3 | answers of 5, 130, 1 to the first | of 64 to the second | alone 90]
SEQUENCES = [(0, 70, 0, 0), (70, 3, 0, 0), (73, 5, 0, 70), (78, 130, 0, 70), (208, 1, 0, 70)]
SEQUENCES += [(209, 64, 70, 3), (273, 90, 0, 0)]
NUM_TOKENS, NUM_PADDING = 363, 5


def numbers(*shape, device, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def written_out(query, key, value, *, scaling, window, softcap, sinks):
    """Outputs and log-sum-exp in fp64."""
    output = torch.zeros(len(query), query.shape[1], value.shape[2], dtype=torch.float64)
    log_sum = torch.zeros(query.shape[1], len(query), dtype=torch.float64)
    for start, length, shared_start, num_shared in SEQUENCES:
        tokens = [*range(shared_start, shared_start + num_shared), *range(start, start + length)]
        keys, values = (
            x[tokens].cpu().double().repeat_interleave(query.shape[1] // key.shape[1], 1)
            for x in (key, value)
        )
        for place in range(length):
            seen = num_shared + place + 1
            q = query[start + place].cpu().double()
            x = torch.einsum("hd,thd->ht", q, keys[:seen]) * scaling
            if softcap is not None:
                x = softcap * torch.tanh(x / softcap)
            if window is not None:
                x[:, : max(0, seen - window)] = -torch.inf
            if sinks is not None:
                x = torch.cat([x, sinks.cpu().double()[:, None]], 1)
            weights = x.softmax(-1)[:, :seen]
            output[start + place] = torch.einsum("ht,thd->hd", weights, values[:seen])
            log_sum[:, start + place] = x.logsumexp(-1)
    return output, log_sum


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=INTERPRETED),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("option", ["plain", "window 5", "window 70", "softcap", "sinks"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (4, 4, 80)])
def test_tokens_see_the_shared_prompt_and_their_own_past(
    device, dtype, option, heads, kv_heads, dim
):
    from verl.models.kernels.packed_attention import (
        Continuation,
        Tiles,
        packed_attention,
        tokens_per_tile,
    )

    def make(*shape, seed):
        return numbers(*shape, device=device, dtype=dtype, seed=seed)

    count = NUM_TOKENS + NUM_PADDING
    query = make(heads, count, dim, seed=1).transpose(0, 1)  # as models hand it over
    key, value = make(count, kv_heads, dim, seed=2), make(count, kv_heads, dim, seed=3)
    options = {
        "scaling": dim**-0.5,
        "softcap": 3.0 if option == "softcap" else None,
        "sinks": make(heads, seed=4) if option == "sinks" else None,
    }
    window = int(option.split()[1]) if option.startswith("window") else None
    tiles = Tiles(
        [Continuation(*sequence) for sequence in SEQUENCES],
        tokens_per_tile(query, key),
        torch.device(device),
    )
    output, log_sum = packed_attention(query, key, value, tiles, sliding_window=window, **options)
    expected, expected_sum = written_out(query, key, value, window=window, **options)
    assert output.dtype == dtype
    assert (output[NUM_TOKENS:] == 0).all()
    difference = (output.cpu().double() - expected).abs().max()
    assert difference <= TOLERANCE[dtype] * expected.abs().max()
    assert (log_sum.cpu() - expected_sum).abs().max() <= max(TOLERANCE[dtype], 1e-5)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=INTERPRETED),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_a_shared_prompt_in_another_tensor_gives_the_same_bits(device, dtype):
    from verl.models.kernels.packed_attention import (
        Continuation,
        Tiles,
        packed_attention,
        tokens_per_tile,
    )

    query, key, value = (
        numbers(100, heads, 16, device=device, dtype=dtype, seed=seed)
        for heads, seed in ((6, 1), (2, 2), (2, 3))
    )
    tiles = Tiles([Continuation(70, 30, 0, 70)], tokens_per_tile(query, key), torch.device(device))
    inside, _ = packed_attention(query, key, value, tiles, scaling=0.25)
    # More heads than are looked at: other steps from token to token than own keys have.
    shared = tuple(torch.cat([x[:70], -x[:70]], 1) for x in (key, value))
    key, value = (torch.cat([torch.full_like(x[:70], torch.nan), x[70:]]) for x in (key, value))
    apart, _ = packed_attention(query, key, value, tiles, shared=shared, scaling=0.25)
    assert torch.equal(apart[70:], inside[70:])


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=INTERPRETED)])
def test_pieces_cover_every_sequence_from_its_end(device):
    from verl.models.kernels.packed_attention import Continuation, Tiles

    tiles = Tiles([Continuation(0, 5), Continuation(5, 4, 0, 5)], 2, torch.device(device))
    offset, start, length, _, num_shared = tiles.columns
    assert offset.tolist() == [4, 2, 0, 2, 0]
    assert start.tolist() == [0, 0, 0, 5, 5]
    assert length.tolist() == [5, 5, 5, 4, 4]
    assert num_shared.tolist() == [0, 0, 0, 5, 5]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (12, 2, 128), (4, 4, 80)])
def test_a_decoded_token_gets_the_bits_of_a_packed_one(dtype, window, heads, kv_heads, dim):
    from verl.models.kernels.decode_attention import SlotRows, slot_decode_attention
    from verl.models.kernels.packed_attention import (
        Continuation,
        Tiles,
        packed_attention,
        tokens_per_tile,
    )

    generator = torch.Generator().manual_seed(0)
    num_rows, longest = 64, 700
    shared = torch.randint(1, 300, (num_rows,), generator=generator)
    own = torch.randint(1, longest - 300, (num_rows,), generator=generator)
    lengths = (shared + own).tolist()

    def make(*shape, seed):
        return numbers(*shape, device="cuda", dtype=dtype, seed=seed)

    total = sum(lengths)
    query, key, value = (
        make(total, h, dim, seed=seed) for h, seed in ((heads, 1), (kv_heads, 2), (kv_heads, 3))
    )
    starts = (torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)).tolist()
    whole = [Continuation(start, length) for start, length in zip(starts, lengths, strict=True)]
    tiles = Tiles(whole, tokens_per_tile(query, key), torch.device("cuda"))
    packed, _ = packed_attention(query, key, value, tiles, scaling=dim**-0.5, sliding_window=window)
    prompt = tuple(make(num_rows, kv_heads, 300, dim, seed=s) for s in (4, 5))
    response = tuple(make(num_rows, kv_heads, longest, dim, seed=s) for s in (6, 7))
    for row, start in enumerate(starts):
        for slots, new, first, count in (
            (prompt[0], key, start, shared[row]),
            (prompt[1], value, start, shared[row]),
            (response[0], key, start + shared[row], own[row] - 1),
            (response[1], value, start + shared[row], own[row] - 1),
        ):
            slots[row, :, :count] = new[first : first + count].transpose(0, 1)
    last = torch.tensor(starts) + torch.tensor(lengths) - 1
    rows = torch.arange(num_rows)
    columns = (x.cuda() for x in (rows, rows, shared, own - 1))
    decoded = slot_decode_attention(
        query[last], key[last], value[last], prompt, response, SlotRows(*columns),
        scaling=dim**-0.5, sliding_window=window,
    )  # fmt: skip
    assert torch.equal(decoded, packed[last])
