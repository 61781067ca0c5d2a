"""Ranks that divide the tokens of a pass find what one rank finds that has them all."""

import pytest
import torch
import torch.distributed as dist

from tests.tiny_models import ARCHITECTURES, VOCABULARY, tiny_config, tiny_model
from tests.utils.one_rank import group_of_one
from tests.utils.two_ranks import run_on_ranks, run_on_two_ranks
from verl.models.attention import AttentionLayout, AttentionOptions, key_heads_of_rank
from verl.models.exact import make_exact
from verl.models.forward import hidden_states, packed_layout, packed_positions
from verl.models.loading import random_causal_lm
from verl.models.ulysses import SequenceShard, UlyssesLayout, refuse_unshardable

CASES = {
    **{name: (name, [7, 1, 12, 3, 10], {}) for name in ARCHITECTURES},
    **{
        f"{name} with one key head": (name, [7, 1, 12], {"num_key_value_heads": 1})
        for name in ("llama", "gemma2", "gpt_oss")
    },
    "tokens for one rank only": ("llama", [1], {}),
    "one token more than a rank has": ("qwen2", [2, 1], {}),
}
SLOW_CASES = {
    "2 key heads on 4 ranks": ("llama", [7, 1, 12, 3, 10], {}),
    "sinks on 4 ranks": ("gpt_oss", [7, 1, 12, 3, 10], {}),
    "soft cap and window on 4 ranks": ("gemma2", [9, 8], {}),
    "3 key heads on 4 ranks": (
        "qwen3",
        [5, 14],
        {"num_attention_heads": 12, "num_key_value_heads": 3},
    ),
    "fewer tokens than ranks": ("qwen2", [2], {}),
}


def ids_and_pulls(lengths):
    generator = torch.Generator().manual_seed(3)
    num_tokens = sum(lengths)
    ids = torch.randint(3, VOCABULARY, (num_tokens,), generator=generator)
    return ids, torch.randn(num_tokens, 32, generator=generator)


def found_by_all(case):
    """Hidden states of all tokens, and the gradients of their sum weighted by random numbers."""
    model_type, lengths, changes = case
    model = tiny_model(model_type, **changes)
    ids, pulls = ids_and_pulls(lengths)
    positions = packed_positions(lengths)
    hidden = hidden_states(model, ids, positions, packed_layout(model, lengths))
    (hidden * pulls).sum().backward()
    return hidden.detach().numpy(), gradients(model)


def found_by_one_rank(case):
    """The same of one rank's tokens; its gradients are the part it contributes."""
    model_type, lengths, changes = case
    model = tiny_model(model_type, **changes)
    ids, pulls = ids_and_pulls(lengths)
    assert dist.group.WORLD is not None
    shard = SequenceShard(len(ids), torch.arange(len(ids)), dist.group.WORLD)
    layout = UlyssesLayout(packed_layout(model, lengths), shard)
    positions = packed_positions(lengths)
    hidden = hidden_states(model, shard.select(ids), shard.select(positions), layout)[shard.sources]
    (hidden * pulls[shard.rows]).sum().backward()
    return hidden.detach().numpy(), gradients(model)


def gradients(model):
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def found_by_two(tmp_path_factory):
    def work(rank):
        del rank
        return {name: found_by_one_rank(case) for name, case in CASES.items()}

    return run_on_two_ranks(work, tmp_path_factory.mktemp("ranks"))


def assert_ranks_add_up(case, found):
    hidden, expected = found_by_all(case)
    parts = torch.cat([torch.tensor(part) for part, _ in found])
    torch.testing.assert_close(parts, torch.tensor(hidden), rtol=1e-5, atol=1e-5)
    assert expected
    for name, gradient in expected.items():
        summed = sum(torch.tensor(part[name]) for _, part in found)
        largest = abs(gradient).max()
        torch.testing.assert_close(
            summed, torch.tensor(gradient), rtol=1e-5, atol=1e-5 * max(1.0, largest), msg=name
        )


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_gradients_of_two_ranks_are_those_of_one(name, found_by_two):
    assert_ranks_add_up(CASES[name], [found[name] for found in found_by_two])


@pytest.mark.slow
def test_hidden_states_and_gradients_of_four_ranks_are_those_of_one(tmp_path):
    def work(rank):
        del rank
        return {name: found_by_one_rank(case) for name, case in SLOW_CASES.items()}

    found_by_four = run_on_ranks(4, work, tmp_path)
    for name, case in SLOW_CASES.items():
        assert_ranks_add_up(case, [found[name] for found in found_by_four])


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_goes_through_collectives_comes_back_as_it_was(device, backend, dtype, tmp_path):
    lengths = [7, 1, 12]
    model = tiny_model("gemma2").to(device, dtype)
    ids, pulls = (x.to(device) for x in ids_and_pulls(lengths))
    positions, inner = packed_positions(lengths).to(device), packed_layout(model, lengths)
    found = []
    with group_of_one(backend, tmp_path) as group:
        shard = SequenceShard(len(ids), torch.arange(len(ids), device=device), group)
        for layout in (inner, UlyssesLayout(inner, shard)):
            model.zero_grad()
            hidden = hidden_states(model, ids, positions, layout)
            values = shard.gather(hidden.sum(1))
            (hidden * pulls).sum().backward()
            found.append([values.detach(), hidden.detach(), *(p.grad for p in model.parameters())])
    for whole, sharded in zip(*found, strict=True):
        assert whole is not None
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # sums on a GPU have no fixed order
        torch.testing.assert_close(sharded, whole, rtol=tolerance, atol=tolerance)


class Seen(AttentionLayout):
    """Gives every token its value, and keeps what it was shown."""

    def attend(self, layer, query, key, value, options):
        self.query = query
        return value


def test_attention_sees_all_tokens_but_no_padding_for_a_part_of_the_heads(tmp_path):
    numbers = torch.arange(3 * 4).view(3, 4, 1)  # token 0 has 0 to 3 in its heads, token 1 4 to 7

    def work(rank):
        del rank
        assert dist.group.WORLD is not None
        shard, seen = SequenceShard(3, torch.arange(0), dist.group.WORLD), Seen()
        own = shard.select(numbers)
        output = UlyssesLayout(seen, shard).attend(0, own, own, own, AttentionOptions(1.0))
        return seen.query.flatten(1).tolist(), output.flatten(1).tolist()

    assert run_on_two_ranks(work, tmp_path) == [
        ([[0, 1], [4, 5], [8, 9]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([[2, 3], [6, 7], [10, 11]], [[8, 9, 10, 11], [0, 0, 0, 0]]),
    ]


def test_gathered_values_are_in_the_order_of_their_sources_and_count_once(tmp_path):
    def work(rank):
        assert dist.group.WORLD is not None
        sources = torch.tensor([4, 0, 3, 3, 1])  # five tokens: rank 0 has 0 to 2, rank 1 the rest
        shard = SequenceShard(5, sources, dist.group.WORLD)
        values = (100.0 * rank + shard.sources).requires_grad_()
        gathered = shard.gather(values)
        (gathered * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).sum().backward()
        nothing = SequenceShard(5, sources[:0], dist.group.WORLD).gather(torch.zeros(0))
        assert values.grad is not None
        return gathered.tolist(), values.grad.tolist(), nothing.tolist()

    gathered = [101.0, 0.0, 100.0, 100.0, 1.0]
    assert run_on_two_ranks(work, tmp_path) == [
        (gathered, [2.0, 5.0], []),
        (gathered, [1.0, 3.0, 4.0], []),
    ]


def test_models_that_cannot_be_divided_are_refused_with_the_way_out(tmp_path):
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "factor": 2.0,
        "original_max_position_embeddings": 128,
    }
    models = [
        tiny_model("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24),
        make_exact(tiny_model("llama"), capacity=32),
        random_causal_lm(tiny_config("phi3", rope_parameters=longrope)),
        tiny_model("gemma3_text"),
    ]

    def work(rank):
        del rank
        assert dist.group.WORLD is not None
        return [refusal(model, dist.group.WORLD) for model in models]

    for heads, exact, rope, accepted in run_on_two_ranks(work, tmp_path):
        assert "(2) must divide the 3 attention heads" in heads
        assert "possible are 1, 3" in heads
        assert "turn exact mode off" in exact
        assert "'longrope' rotary embeddings" in rope
        assert accepted == ""


def refusal(model, group):
    try:
        refuse_unshardable(model, group)
    except ValueError as error:
        return str(error)
    return ""


def test_key_heads_go_with_the_queries_that_use_them():
    assert [key_heads_of_rank(4, 2, rank) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [key_heads_of_rank(2, 4, rank) for rank in range(4)] == [[0], [0], [1], [1]]
    # 12 query heads, 4 to a key head: rank 1 has queries 3 to 5, which use key heads 0, 1 and 1.
    shares = [key_heads_of_rank(3, 4, rank) for rank in range(4)]
    assert shares == [[0, 0, 0], [0, 1, 1], [1, 1, 2], [2, 2, 2]]
