"""What a prefill computes, and the sizes for which passes are captured."""

import itertools

import pytest
from torch import nn

from tests.tiny_models import tiny_model
from verl.workers.rollout.native.attention import PrefillSequence
from verl.workers.rollout.native.model_runner import (
    ModelRunner,
    batch_sizes,
    packed_tokens,
    prefill_sizes,
)
from verl.workers.rollout.native.sessions import KnownTokens


def test_new_tokens_stand_end_to_end_at_the_positions_they_have_in_their_sequences():
    sequences = [
        PrefillSequence(token_ids=[5, 6, 7], num_shared=3, prompt_slot=0, slots=[0]),
        PrefillSequence(
            token_ids=[8, 9, 10, 11],
            num_shared=4,
            prompt_slot=1,
            slots=[1],
            known=KnownTokens(token_ids=[8, 9, 10]),
        ),
        PrefillSequence(token_ids=[12, 13], num_shared=2, prompt_slot=2, slots=[2]),
    ]
    ids, positions, last = packed_tokens(sequences)
    assert ids.tolist() == [5, 6, 7, 11, 12, 13]
    assert positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert last.tolist() == [2, 3, 5]


def test_sizes_go_up_to_the_largest_number_that_can_come():
    assert batch_sizes(40) == [8, 12, 16, 24, 32, 40]
    assert prefill_sizes(200) == [64, 96, 128, 192, 200]
    assert prefill_sizes(5000)[-4:] == [3072, 4096, 4608, 5000]
    assert prefill_sizes(64) == [64]
    assert prefill_sizes(10) == [10]


def test_a_prefill_computes_a_third_in_vain_at_most_and_an_eighth_where_it_is_large():
    sizes = prefill_sizes(100_000)
    for below, size in itertools.pairwise(sizes):
        in_vain = size - (below + 1)
        assert in_vain <= size / (8 if size > 4096 else 3)
    assert len(sizes) < 60


def test_a_model_with_a_layer_that_keeps_something_else_is_refused():
    class Recurrent(nn.Module):
        def forward(self, hidden_states, **kwargs):
            return hidden_states, None

    model = tiny_model("llama")
    model.model.layers[1].self_attn = Recurrent()
    with pytest.raises(ValueError, match=r"used attention in layers \[0\] only"):
        ModelRunner(model).head_shapes()
