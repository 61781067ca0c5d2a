"""Policy filtration: the weights, and rows that move together."""

import numpy as np
import pytest
import torch

from verl.algos.pf_ppo import compute_pf_ppo_reweight_data, reweight_weights
from verl.protocol import DataProto


def scored_batch(scores):
    B = len(scores)
    token_level_scores = torch.zeros(B, 3)
    token_level_scores[:, 1] = torch.tensor(scores)
    return DataProto.from_dict(
        tensors={"token_level_scores": token_level_scores, "row": torch.arange(B)},
        non_tensors={"uid": np.array([f"u{row}" for row in range(B)], dtype=object)},
        meta_info={"lengths": list(range(B)), "temperature": 0.7, "short": [1, 2]},
    )


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_weights_worked_by_hand():
    score = torch.tensor([-2.0, 0.0, 1.0, 3.0, 3.0])
    assert reweight_weights(score, "pow", 2.0).tolist() == [4.0, 0.0, 1.0, 9.0, 9.0]
    assert reweight_weights(score, "pow", 1.0).tolist() == [2.0, 0.0, 1.0, 3.0, 3.0]
    assert reweight_weights(score, "max_min").tolist() == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert reweight_weights(score, "max_random").tolist() == pytest.approx([0.1] * 3 + [0.4] * 2)


def test_scores_of_zero_are_drawn_alike():
    assert reweight_weights(torch.zeros(3), "pow").tolist() == [1.0, 1.0, 1.0]
    drawn = compute_pf_ppo_reweight_data(scored_batch([0.0] * 3), generator=seeded())
    assert len(drawn) == 3


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"reweight_method is 'best'.*pow, max_min, max_random"):
        reweight_weights(torch.ones(2), "best")


def test_tensors_arrays_and_lists_of_a_row_stay_together():
    batch = scored_batch([1.0, 2.0, 3.0, 4.0, 5.0])
    drawn = compute_pf_ppo_reweight_data(batch, generator=seeded())
    rows = drawn.batch["row"].tolist()
    assert len(rows) == 5
    assert drawn.non_tensor_batch["uid"].tolist() == [f"u{row}" for row in rows]
    assert drawn.meta_info["lengths"] == rows
    assert torch.equal(drawn.batch["token_level_scores"], batch.batch["token_level_scores"][rows])
    assert drawn.meta_info["temperature"] == 0.7
    assert drawn.meta_info["short"] == [1, 2]  # not one entry per row


def test_the_batch_given_is_left_as_it_was():
    batch = scored_batch([1.0, 2.0, 3.0])
    compute_pf_ppo_reweight_data(batch, generator=seeded())
    assert batch.batch["row"].tolist() == [0, 1, 2]
    assert batch.meta_info["lengths"] == [0, 1, 2]


def test_a_generator_makes_the_draw_repeatable():
    batch = scored_batch([1.0, 2.0, 3.0, 4.0] * 8)
    first, second, other = (
        compute_pf_ppo_reweight_data(batch, generator=seeded(seed)).batch["row"].tolist()
        for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


def test_rows_are_drawn_as_often_as_their_weight_says():
    # |s|^2 = 1 and 9: nine draws of ten are of the second kind.
    batch = scored_batch([1.0, 3.0] * 4000)
    drawn = compute_pf_ppo_reweight_data(batch, "pow", 2.0, generator=seeded())
    share = (drawn.batch["row"] % 2 == 1).float().mean().item()
    assert share == pytest.approx(0.9, abs=0.015)


def test_rows_without_weight_are_never_drawn():
    batch = scored_batch([-1.0, 0.0, 0.5, 2.0] * 50)
    drawn = compute_pf_ppo_reweight_data(batch, "max_min", generator=seeded())
    assert set((drawn.batch["row"] % 4).tolist()) == {0, 3}


def test_a_score_that_is_no_number_is_refused_by_row():
    with pytest.raises(ValueError, match=r"token_level_scores .*row 1\b"):
        compute_pf_ppo_reweight_data(scored_batch([1.0, float("nan")]), generator=seeded())
