import torch

from verl.utils.scramble import scramble, uniform


def splitmix(x):
    """The published function on Python integers."""
    mask = 2**64 - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


def test_the_hash_is_splitmix64_on_every_kind_of_integer():
    numbers = [0, 1, 2, 12345, 2**63 - 1, -1, -5, -(2**63)]
    ours = scramble(torch.tensor(numbers)).tolist()
    assert [x % 2**64 for x in ours] == [splitmix(x % 2**64) for x in numbers]


def test_uniform_numbers_fill_the_interval_evenly_and_independently():
    seeds, counters = torch.arange(2000)[:, None], torch.arange(50)[None, :]
    drawn = uniform(*torch.broadcast_tensors(seeds, counters))
    assert 0 <= drawn.min() < drawn.max() < 1
    counts = torch.histc(drawn, bins=20, min=0, max=1)
    chi_square = ((counts - 5000) ** 2 / 5000).sum()
    assert chi_square < 43.8  # the 99.9th percentile with 19 degrees of freedom
    for lag in (drawn[:, :-1] - 0.5) * (drawn[:, 1:] - 0.5), (drawn[:-1] - 0.5) * (drawn[1:] - 0.5):
        assert lag.mean().abs() < 4 * lag.std() / lag.numel() ** 0.5
