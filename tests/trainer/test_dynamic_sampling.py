import numpy as np
import pytest
import torch

from verl.config.algorithm import FilterGroupsConfig
from verl.protocol import DataProto
from verl.trainer.ppo.dynamic_sampling import fill_batch, informative_rows, metric_values


def batch(uids, scores, **reported) -> DataProto:
    data = DataProto.from_dict(
        tensors={"token_level_scores": torch.tensor([[0.0, score] for score in scores])},
        non_tensors={"uid": list(uids)},
        meta_info={"reward_extra_keys": list(reported), "timing": len(uids)},
    )
    for name, values in reported.items():
        data.non_tensor_batch[name] = np.array(values, dtype=object)
    return data


def fill(*batches, num_prompts, **options):
    pending = list(batches[1:])
    config = FilterGroupsConfig(enable=True, **{"metric": "score", **options})
    return fill_batch(
        batches[0],
        config=config,
        num_prompts=num_prompts,
        score=lambda data: data,
        generate_more=lambda: pending.pop(0),
    )


def test_prompts_whose_responses_score_alike_are_dropped():
    assert informative_rows(batch("aabbcc", [1, 1, 0, 1, 0, 0]), "score") == [2, 3]


def test_scores_are_compared_exactly():
    almost = [0.1 + 0.2, 0.3]  # equal in single precision, in which rewards are kept
    assert informative_rows(batch("aa", almost), "score") == []
    assert informative_rows(batch("aa", [0.3, 0.3001]), "score") == [0, 1]


def test_a_single_response_always_counts():
    assert informative_rows(batch("ab", [1, 1]), "score") == [0, 1]


def test_what_must_differ_can_be_anything_that_was_reported():
    data = batch("aabb", [0, 1, 0, 1], acc=[True, True, True, False])
    assert informative_rows(data, "acc") == [2, 3]
    assert informative_rows(data, "seq_reward") == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"'accuracy', but responses only have: score, .*acc"):
        metric_values(data, "accuracy")


def test_batches_are_generated_until_there_are_enough_prompts_and_the_rest_is_cut_off():
    filled = fill(
        batch("aabb", [0, 1, 1, 1]),
        batch("ccdd", [0, 0, 0, 0]),
        batch("eeff", [0, 1, 1, 0], pred=["x", "y", "z", "w"]),
        num_prompts=2,
    )
    assert filled.batch.non_tensor_batch["uid"].tolist() == ["a", "a", "e", "e"]
    assert filled.batch.non_tensor_batch["pred"].tolist() == [None, None, "x", "y"]
    assert (filled.num_gen_batches, filled.num_dropped_groups) == (3, 3)
    assert "timing" not in filled.batch.meta_info


def test_too_many_batches_in_vain_are_an_error_with_the_ways_out():
    dull = [batch("aabb", [1, 1, 0, 0]) for _ in range(3)]
    with pytest.raises(ValueError, match=r"2 generation batches gave 0 of 1 .*max_num_gen_batches"):
        fill(*dull, num_prompts=1, max_num_gen_batches=2)


def test_zero_sets_no_limit():
    dull = [batch("aabb", [1, 1, 0, 0]) for _ in range(20)]
    assert fill(*dull, batch("cc", [0, 1]), num_prompts=1).num_gen_batches == 21
