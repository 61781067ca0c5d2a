"""Tokens go to their places in the cache, and nothing else changes."""

import pytest
import torch

from tests.models.kernels.devices import on_each_device, on_each_dtype


@on_each_device
@on_each_dtype
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (24, 40)])
def test_tokens_are_written_to_their_places_and_nowhere_else(device, dtype, key_dim, value_dim):
    from verl.models.kernels.cache_writes import write_tokens

    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    num_tokens, num_copies, heads = 50, 45, 3
    key = numbers(heads, num_tokens, key_dim).transpose(0, 1)  # as models hand it over
    value = numbers(num_tokens, heads, value_dim)
    store = numbers(6, heads, 20, key_dim), numbers(6, heads, 20, value_dim)
    places = torch.randperm(6 * 20, generator=generator)[:num_copies]
    places[-3:] = places[-4]  # once more to the same place
    tokens = torch.randint(0, num_tokens, (num_copies,), generator=generator)
    tokens[-3:] = tokens[-4]
    token, slot, position = (x.to(device) for x in (tokens, places // 20, places % 20))
    expected = [slots.clone() for slots in store]
    for slots, new in zip(expected, (key, value), strict=True):
        slots[slot, :, position] = new[token]
    write_tokens(store, key, value, token, slot, position)
    for ours, theirs in zip(store, expected, strict=True):
        assert torch.equal(ours, theirs)
