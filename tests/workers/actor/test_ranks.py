"""An update on several ranks is the update that one rank makes: weights, norms and metrics."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.tiny_models import plain_twin, tiny_config, tiny_model
from tests.utils.two_ranks import run_on_ranks
from tests.workers.actor.test_dp_actor import batch, with_old_log_probs
from verl.config.actor import FSDPActorConfig, PolicyLossConfig
from verl.config.critic import FSDPCriticConfig
from verl.config.engine import FSDPEngineConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.loading import empty_value_model, load_value_model, random_causal_lm
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.critic.dp_critic import DataParallelPPOCritic
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.zero1 import Zero1Engine
from verl.workers.schedule import MicroBatching, UpdatePlan, plan_update

NUM_ROWS, ROWS_PER_STEP = 7, 4  # the second step has 3 rows: uneven for two ranks
BY_ROWS = {"ppo_micro_batch_size_per_gpu": 2}
BY_TOKENS = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 16}


def loss_of(mode="vanilla", aggregation="token-mean", **options):
    return {
        "policy_loss": PolicyLossConfig(loss_mode=mode, clip_cov_ratio=0.2, kl_cov_ratio=0.2),
        "loss_agg_mode": aggregation,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "entropy_coeff": 0.01,
        "ppo_epochs": 2,
        **options,
    }


CASES = {
    "zero1, tokens averaged": ("zero1", loss_of(**BY_ROWS)),
    "zero1, by tokens, sequences averaged": (
        "zero1",
        loss_of(aggregation="seq-mean-token-mean", **BY_TOKENS),
    ),
    "zero1, selected tokens, shuffled": ("zero1", loss_of("kl_cov", shuffle=True, **BY_ROWS)),
    "full, by tokens, tokens averaged": ("full", loss_of(**BY_TOKENS)),
    "full, sums of sequences": ("full", loss_of(aggregation="seq-mean-token-sum", **BY_ROWS)),
    "full, divided by a constant": (
        "full",
        loss_of("clip_cov", aggregation="seq-mean-token-sum-norm", **BY_TOKENS),
    ),
}


QUICK_CASES = (
    "zero1, by tokens, sequences averaged",
    "zero1, selected tokens, shuffled",
    "full, by tokens, tokens averaged",
)


def engine_of(kind, build, skeleton, **options):
    optimizer = FSDPOptimizerConfig(lr=0.05, optimizer="SGD", weight_decay=0.0)
    options = {"max_grad_norm": 1.0, **options}
    if kind == "one":
        engine = OneDeviceEngine(build, optimizer, **options)
    elif kind == "zero1":
        engine = Zero1Engine(build, optimizer, **options)
    else:
        engine = FSDPEngine(
            build,
            optimizer,
            build_skeleton=skeleton,
            config=FSDPEngineConfig(),
            compute_dtype=torch.float32,
            device="cpu",
            **options,
        )
    engine.initialize()
    return engine


def skeleton():
    with torch.device("meta"):
        return random_causal_lm(tiny_config("llama"))


def actor(kind, options, **engine_options):
    engine = engine_of(kind, lambda: tiny_model("llama"), skeleton, **engine_options)
    return DataParallelPPOActor(FSDPActorConfig(**options), engine)


def critic(kind, options, path):
    engine = engine_of(
        kind, partial(load_value_model, path), partial(empty_value_model, path), is_value_model=True
    )
    return DataParallelPPOCritic(FSDPCriticConfig(**options), engine)


def plan_for(data, config, num_ranks):
    cut = {"rows": config.ppo_micro_batch_size_per_gpu}
    if config.use_dynamic_bsz:
        cut = {"tokens": config.ppo_max_token_len_per_gpu}
    plan = plan_update(
        data["attention_mask"].sum(-1).tolist(),
        data["response_mask"].sum(-1).tolist(),
        rows_per_step=ROWS_PER_STEP,
        micro_batching=MicroBatching(**cut),
        num_ranks=num_ranks,
        epochs=config.ppo_epochs,
        shuffle_seed=config.data_loader_seed if config.shuffle else None,
    )
    return UpdatePlan.from_dict(plan.to_dict())


def updated(built, data, rank=0, num_ranks=1):
    """The metrics of an update, and the weights after it."""
    options = {"rows_per_step": ROWS_PER_STEP}
    if num_ranks > 1:
        options["plan"] = plan_for(data, built.config, num_ranks)
        data = data[options["plan"].rows_of(rank)]
    if isinstance(built, DataParallelPPOCritic):
        metrics = built.update_critic(data, **options)
    else:
        metrics = built.update_policy(data, temperature=0.8, old_policy_version=0, **options)
    weights = {
        name: weight.detach().numpy().copy() for name, weight in built.engine.get_per_tensor_param()
    }
    return metrics, weights


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-6)
    for name, value in expected[1].items():
        assert abs(found[1][name] - value).max() < 1e-5, name


def rows_with_old_log_probs(num_rows=NUM_ROWS):
    return with_old_log_probs(actor("one", loss_of(**BY_ROWS)), batch())[:num_rows]


def check_policy_updates(num_ranks, cases, data, folder):
    expected = [updated(actor("one", options), data) for _, options in cases]
    assert all(metrics["actor/num_optimizer_steps"] == 4 for metrics, _ in expected)

    def work(rank):
        return [updated(actor(kind, options), data, rank, num_ranks) for kind, options in cases]

    for answers in run_on_ranks(num_ranks, work, folder):
        for found, one in zip(answers, expected, strict=True):
            assert_same(found, one)


def test_a_policy_update_on_two_ranks_is_the_one_of_a_single_rank(tmp_path):
    cases = [CASES[name] for name in QUICK_CASES]
    check_policy_updates(2, cases, rows_with_old_log_probs(), tmp_path)


@pytest.mark.slow
def test_every_policy_update_on_two_ranks_is_the_one_of_a_single_rank(tmp_path):
    check_policy_updates(2, list(CASES.values()), rows_with_old_log_probs(), tmp_path)


@pytest.mark.slow
def test_a_policy_update_on_four_ranks_is_the_one_of_a_single_rank(tmp_path):
    check_policy_updates(4, list(CASES.values()), rows_with_old_log_probs(), tmp_path)


def check_divided_sequences(num_ranks, data, folder):
    """Two ranks for each row: the tokens of a row are on both."""
    options = loss_of(**BY_TOKENS)
    expected = updated(actor("one", options), data)

    def work(rank):
        pairs = [dist.new_group([first, first + 1]) for first in range(0, num_ranks, 2)]
        answers = []
        for kind in ("zero1", "full"):
            built = actor(kind, options, sequence_group=pairs[rank // 2])
            engine = built.engine
            assert engine.get_data_parallel_size() == num_ranks // 2
            assert engine.get_data_parallel_rank() == rank // 2
            assert engine.is_mp_src_rank_with_outputs() == (rank % 2 == 0)
            answers.append(updated(built, data, rank // 2, num_ranks // 2))
        return answers

    for answers in run_on_ranks(num_ranks, work, folder):
        for found in answers:
            assert_same(found, expected)


def test_two_ranks_that_divide_sequences_make_the_update_of_one(tmp_path):
    check_divided_sequences(2, rows_with_old_log_probs(), tmp_path)


@pytest.mark.slow
def test_two_pairs_of_ranks_that_divide_sequences_make_the_update_of_one(tmp_path):
    check_divided_sequences(4, rows_with_old_log_probs(), tmp_path)


def test_ranks_without_rows_take_part(tmp_path):
    """Three ranks for two rows, of which one has no response."""
    options = loss_of(**BY_ROWS)
    data = rows_with_old_log_probs()[[2, 4]]
    expected = updated(actor("one", options), data)

    def work(rank):
        return [updated(actor(kind, options), data, rank, 3) for kind in ("zero1", "full")]

    for answers in run_on_ranks(3, work, tmp_path):
        for found in answers:
            assert_same(found, expected)


def test_a_critic_update_on_two_ranks_is_the_one_of_a_single_rank(tmp_path):
    plain_twin(tiny_model("llama")).save_pretrained(tmp_path)
    data = batch()[:NUM_ROWS]
    cases = [
        ("zero1", {"ppo_epochs": 2, **BY_ROWS}),
        ("full", {"ppo_epochs": 2, "loss_agg_mode": "seq-mean-token-mean", **BY_TOKENS}),
    ]
    expected = [updated(critic("one", options, tmp_path), data) for _, options in cases]

    def work(rank):
        answers = []
        for kind, options in cases:
            built = critic(kind, options, tmp_path)
            answers.append(updated(built, data, rank, 2))
        return answers

    for answers in run_on_ranks(2, work, tmp_path):
        for found, one in zip(answers, expected, strict=True):
            assert_same(found, one)
            assert found[1]["score.weight"].any(), "the head has moved from zero"


def test_ranks_without_a_plan_are_told_so(tmp_path):
    data = rows_with_old_log_probs()

    def work(rank):
        with pytest.raises(ValueError, match="put a plan for all ranks into meta_info"):
            updated(actor("zero1", loss_of(**BY_ROWS)), data, rank, num_ranks=1)

    run_on_ranks(2, work, tmp_path)


def test_ranks_whose_losses_report_different_metrics_are_told_so(tmp_path):
    data = rows_with_old_log_probs()

    def work(rank):
        built = actor("zero1", loss_of(**BY_ROWS))
        policy_loss = built.policy_loss

        def with_another_name(**arguments):
            loss, report = policy_loss(**arguments)
            return loss, {**report, f"actor/of_rank_{rank}": 1.0}

        built.policy_loss = with_another_name
        with pytest.raises(ValueError, match="ranks reported different metrics"):
            updated(built, data, rank, num_ranks=2)

    run_on_ranks(2, work, tmp_path)
