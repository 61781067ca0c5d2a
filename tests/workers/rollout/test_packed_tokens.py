"""What a prefill computes: the tokens that are not known yet, end to end."""

from verl.workers.rollout.native.attention import PrefillSequence
from verl.workers.rollout.native.model_runner import packed_tokens
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
