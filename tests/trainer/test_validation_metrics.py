import itertools

import numpy as np
import pytest

from verl.trainer.ppo.validation_metrics import (
    bootstrap_metric,
    calc_maj_val,
    collect_reward_extras,
    majority_values,
    name_validation_metrics,
    pass_at_k,
    process_validation_metrics,
    prompt_metrics,
    subset_sizes,
)


def test_means_are_over_the_answers_of_a_prompt_and_then_over_prompts():
    metrics = process_validation_metrics(
        data_sources=["math"] * 4,
        sample_uids=["a", "a", "b", "b"],
        infos_dict={"acc": [1.0, 0.0, 1.0, 1.0]},
    )
    acc = metrics["math"]["acc"]
    assert acc["mean@2"] == 0.75  # (0.5 + 1) / 2
    assert acc["std@2"] == 0.25  # (0.5 + 0) / 2


def test_data_sources_are_kept_apart():
    metrics = process_validation_metrics(
        ["math", "code", "math"], ["a", "b", "c"], {"reward": [1.0, 5.0, 0.0]}
    )
    assert metrics == {"math": {"reward": {"mean@1": 0.5}}, "code": {"reward": {"mean@1": 5.0}}}


def test_best_and_worst_of_two_come_near_their_expectation():
    acc = process_validation_metrics(["m"] * 4, ["a"] * 4, {"acc": [1.0, 0.0, 0.0, 0.0]})["m"][
        "acc"
    ]
    # Two draws with replacement from one right and three wrong answers.
    assert acc["best@2/mean"] == pytest.approx(1 - 0.75**2, abs=0.05)
    assert acc["worst@2/mean"] == pytest.approx(0.25**2, abs=0.03)
    assert set(acc) == {
        "mean@4",
        "std@4",
        *(f"{k}@{n}/{s}" for k in ("best", "worst") for n in (2, 4) for s in ("mean", "std")),
    }


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others():
    def run(seed):
        infos = {"acc": [0.1, 0.2, 0.4, 0.8]}
        return process_validation_metrics(["m"] * 4, ["a"] * 4, infos, seed=seed)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_the_majority_is_scored_where_answers_report_what_they_predict():
    infos = {"acc": [1.0, 1.0, 1.0, 0.0], "pred": ["7", "7", "7", "8"]}
    metrics = process_validation_metrics(["m"] * 4, ["a"] * 4, infos)["m"]
    assert metrics["acc"]["maj@4/mean"] > metrics["acc"]["mean@4"]  # right answers agree
    assert "pred" not in metrics  # text has no mean


def test_a_missing_value_is_skipped_and_counted_and_shifts_nothing():
    infos = {"acc": [None, 0.0, 1.0, 1.0], "format": [None, None, None, None]}
    metrics = process_validation_metrics(["m"] * 4, ["a", "a", "b", "b"], infos)["m"]
    assert metrics["acc"]["mean@2"] == 0.5  # prompt a: 0, prompt b: 1
    assert metrics["acc"]["num_missing"] == 1
    assert "format" not in metrics


def test_a_prompt_without_any_value_is_left_out_of_the_mean():
    metrics = process_validation_metrics(["m"] * 2, ["a", "b"], {"acc": [None, 1.0]})["m"]
    assert metrics["acc"] == {"mean@1": 1.0, "num_missing": 1.0}


def test_prompts_with_fewer_answers_count_under_the_same_name():
    metrics = process_validation_metrics(["m"] * 3, ["a", "a", "b"], {"acc": [1.0, 1.0, 0.0]})["m"]
    assert metrics["acc"]["mean@2"] == 0.5


def test_a_column_of_another_length_is_refused():
    with pytest.raises(ValueError, match="acc has 1 entries for 2 answers"):
        process_validation_metrics(["m"] * 2, ["a", "b"], {"acc": [1.0]})


def test_the_union_of_reported_keys_is_kept_with_none_in_the_gaps():
    samples = [{"score": 1.0}, {"score": 0.0, "acc": True}, {"pred": "7"}]
    assert collect_reward_extras(samples) == {
        "score": [1.0, 0.0, None],
        "acc": [None, True, None],
        "pred": [None, None, "7"],
    }


def test_core_metrics_are_those_of_acc_at_the_largest_n():
    values = {
        "mean@4": 0.5,
        "std@4": 0.1,
        "best@2/mean": 0.6,
        "best@4/mean": 0.7,
        "maj@4/mean": 0.55,
        "worst@4/mean": 0.2,
        "num_missing": 1.0,
    }
    named = name_validation_metrics({"gsm8k": {"acc": values, "reward": {"mean@4": 0.3}}})
    assert {name for name in named if name.startswith("val-core/")} == {
        "val-core/gsm8k/acc/mean@4",
        "val-core/gsm8k/acc/best@4/mean",
        "val-core/gsm8k/acc/maj@4/mean",
    }
    assert named["val-aux/gsm8k/reward/mean@4"] == 0.3
    without_acc = name_validation_metrics({"gsm8k": {"reward": {"mean@1": 0.3}}})
    assert without_acc == {"val-core/gsm8k/reward/mean@1": 0.3}


@pytest.mark.parametrize(("n", "sizes"), [(2, [2]), (3, [2, 3]), (4, [2, 4]), (9, [2, 4, 8, 9])])
def test_subsets_are_the_powers_of_two_below_n_and_n(n, sizes):
    assert subset_sizes(n) == sizes


@pytest.mark.parametrize(("count", "n"), [(4, 2), (5, 4), (16, 16)])
def test_draws_are_those_of_numpys_choice_one_after_another(count, n):
    chance = np.random.RandomState(42)
    draws = np.stack([chance.choice(count, size=n, replace=True) for _ in range(1000)])
    answers = np.arange(count, dtype=float)
    votes = [str(i // 2) for i in range(count)]
    found = prompt_metrics(answers, votes, count, 42)
    assert found[f"best@{n}/mean"] == draws.max(1).mean()
    assert found[f"worst@{n}/std"] == draws.min(1).std()
    elected = [calc_maj_val([{"v": votes[i], "x": i} for i in row], "v", "x") for row in draws]
    assert found[f"maj@{n}/mean"] == np.mean(elected)
    (best,) = bootstrap_metric(answers.tolist(), n, [np.max])
    assert best == (draws.max(1).mean(), draws.max(1).std())


def test_bootstrap_gives_mean_and_spread_of_each_function():
    (mean, std), (largest, _) = bootstrap_metric([0.0, 1.0], 2, [np.mean, np.max])
    assert mean == pytest.approx(0.5, abs=0.05)
    assert std == pytest.approx(np.sqrt(1 / 8), abs=0.03)
    assert largest == pytest.approx(0.75, abs=0.05)
    assert bootstrap_metric([3.0], 5, [np.mean], n_bootstrap=10) == [(3.0, 0.0)]
    with pytest.raises(ValueError, match="nothing to draw from"):
        bootstrap_metric([], 2, [np.mean])


def test_the_most_common_vote_wins_and_the_first_of_equally_common_ones():
    answers = [{"pred": "7", "val": 0.1}, {"pred": "8", "val": 0.9}, {"pred": "8", "val": 0.4}]
    assert calc_maj_val(answers, vote_key="pred", val_key="val") == 0.9
    assert calc_maj_val(answers[:2], vote_key="pred", val_key="val") == 0.1


def test_the_fast_majority_equals_the_one_that_counts_votes():
    votes, values = ["a", "b", "a", "c", "b"], np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    answers = [{"pred": v, "val": x} for v, x in zip(votes, values, strict=True)]
    fast = majority_values(votes, values, n=4, seed=3)
    ((mean, std),) = bootstrap_metric(
        answers, 4, [lambda d: calc_maj_val(d, "pred", "val")], seed=3
    )
    assert fast.mean() == pytest.approx(mean, abs=1e-12)
    assert fast.std() == pytest.approx(std, abs=1e-12)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    assert pass_at_k(num_samples=4, num_correct=1, k=2) == 0.5  # 3 of the 6 pairs hold it
    answers = [True, True, False, False, False]
    subsets = list(itertools.combinations(answers, 3))
    assert pass_at_k(5, 2, 3) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 4, 1) == 1.0
    assert pass_at_k(4, 3, 2) == 1.0  # every pair holds a right answer


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_impossible_counts(samples, correct, k):
    with pytest.raises(ValueError, match=r"pass@k needs|are impossible"):
        pass_at_k(samples, correct, k)
