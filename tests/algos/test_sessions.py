"""A session is one sample: how it is cut into rows changes nothing that is learnt."""

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algos.advantage_cases import EVERY_ESTIMATOR
from tests.algos.loss_cases import actor
from verl.algos.aggregate import LOSS_AGG_MODES, agg_loss
from verl.algos.kl import FixedKLController
from verl.algos.pf_ppo import compute_pf_ppo_reweight_data
from verl.algos.policy_losses.whole_sessions import compares_sequences, prepare_sessions
from verl.algos.registry import get_policy_loss_fn
from verl.algos.rollout_correction.apply import compute_rollout_correction_and_add_to_batch
from verl.algos.sessions import SESSION_INDEX, sequence_tokens, session_sums
from verl.config.algorithm import AlgoConfig, RolloutCorrectionConfig
from verl.protocol import DataProto
from verl.trainer.ppo.credit import apply_kl_penalty, compute_advantage
from verl.workers.mini_batch import global_counts, session_labels
from verl.workers.roles.dispatch import model_rows
from verl.workers.schedule import MicroBatching, StepPlan, UpdatePlan, plan_update

NUM_PROMPTS, NUM_SAMPLES, LENGTH = 3, 4, 12
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
COLUMNS = ("values", "old_log_probs", "rollout_log_probs", "sum_pi_squared", "ref_log_prob")


@dataclass
class Sessions:
    """What was sampled, uncut: tensors are (S, L) by session and token."""

    mask: Tensor
    rewards: Tensor
    log_probs: Tensor
    columns: dict[str, Tensor]

    def batch(self, rows: list[tuple[int, list[int], list[bool]]], *, is_cut: bool) -> DataProto:
        """Rows as (session, its tokens, which of them are this row's own)."""
        width = LENGTH + 3
        names = ("response_mask", "token_level_scores", *self.columns)
        tensors = {name: self.rewards.new_zeros(len(rows), width) for name in names}
        tensors["token"] = torch.full((len(rows), width), -1)
        for place, (session, tokens, owned) in enumerate(rows):
            for at, (token, is_own) in enumerate(zip(tokens, owned, strict=True)):
                tensors["token"][place, at] = session * LENGTH + token
                for name, values in self.columns.items():
                    tensors[name][place, at] = values[session, token]
                if is_own:
                    tensors["response_mask"][place, at] = self.mask[session, token]
                    tensors["token_level_scores"][place, at] = self.rewards[session, token]
        tensors["response_mask"] = tensors["response_mask"].long()
        sessions = np.array([session for session, _, _ in rows])
        tensors["token_level_rewards"] = tensors["token_level_scores"]
        tensors["reward_baselines"] = 0.3 * torch.tensor(sessions // NUM_SAMPLES, dtype=torch.float)
        tensors["attention_mask"] = (tensors["token"] >= 0).long()
        arrays = {"uid": np.array([f"p{s // NUM_SAMPLES}" for s in sessions], dtype=object)}
        if is_cut:
            arrays["session_uid"] = np.array([f"s{s}" for s in sessions], dtype=object)
        return DataProto.from_dict(tensors=tensors, non_tensors=arrays)

    def uncut(self) -> DataProto:
        every = list(range(LENGTH))
        rows = [(session, every, [True] * LENGTH) for session in range(len(self.mask))]
        return self.batch(rows, is_cut=False)

    def cut(self, chooser: random.Random) -> DataProto:
        """Each session in up to five rows; a row begins with what it owns, or repeats, masked, some
        of what earlier rows own, and may own nothing that is trained."""
        rows = []
        for session in range(len(self.mask)):
            borders = sorted(chooser.choices(range(LENGTH + 1), k=chooser.randint(0, 4)))
            for start, end in zip([0, *borders], [*borders, LENGTH], strict=True):
                again = chooser.randint(0, start)
                tokens = list(range(start - again, end))
                rows.append((session, tokens, [False] * again + [True] * (end - start)))
        return self.batch(rows, is_cut=True)


def sampled(seed: int, dtype: torch.dtype, *, has_tools: bool = True) -> Sessions:
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_PROMPTS * NUM_SAMPLES, LENGTH)

    def draw() -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)

    mask = torch.ones(shape, dtype=torch.long)
    if has_tools:
        mask = (draw() < 0.7).long()
        mask[3] = 0  # a session without a trained token
    rewards = 0.1 * draw() * (draw() < 0.2)
    rewards[:, -1] += (draw()[:, 0] < 0.5).to(dtype) + 0.1 * draw()[:, 1]
    # Their sums are exact in any order: a group of nearly equal rewards blows up what is not.
    rewards = (rewards * 256).round() / 256
    if has_tools:
        rewards[5, :] = 0.0
    return Sessions(
        mask=mask,
        rewards=rewards,
        log_probs=-draw(),
        columns={name: -draw() if "log_prob" in name else draw() for name in COLUMNS},
    )


def gradient(
    sessions: Sessions,
    batch: DataProto,
    mode: str,
    *,
    chooser: random.Random | None,
    sessions_per_step: int = NUM_PROMPTS * NUM_SAMPLES,
    case: str = "vanilla",
) -> list[Tensor]:
    """d loss / d log-probs of each optimizer step, from passes on ranks as the planner cuts them;
    without a chooser, from one pass."""
    rows = dict(model_rows(batch).items())
    if chooser is None:
        micro_batching, num_ranks = MicroBatching(rows=1000), 1
    else:
        by_rows = chooser.random() < 0.5
        micro_batching = MicroBatching(
            rows=chooser.randint(3, 9) if by_rows else None,
            tokens=None if by_rows else LENGTH * chooser.randint(2, 6),
        )
        num_ranks = chooser.choice([1, 2])
    plan = plan_update(
        rows["attention_mask"].sum(-1).tolist(),
        rows["response_mask"].sum(-1).tolist(),
        rows_per_step=sessions_per_step,
        micro_batching=micro_batching,
        num_ranks=num_ranks,
        shuffle_seed=1,
        sessions=session_labels(rows),
    )
    log_probs = sessions.log_probs.clone().requires_grad_()
    gradients = []
    for step in plan.steps:
        log_probs.grad = torch.zeros_like(log_probs)
        prepared = whole_sessions(rows, plan, step, log_probs, case)
        for rank, passes in enumerate(step.passes):
            chunk = plan.rows_of(rank)
            for part in passes:
                taken = [chunk[at] for at in part]
                micro = {name: column[taken] for name, column in rows.items()}
                config = actor(case)
                counts = global_counts(step, LENGTH, 9.0)
                config.global_batch_info = {**counts, **sequence_tokens(micro)}
                flat = log_probs.flatten()[micro["token"].clamp(min=0)]
                loss, _ = get_policy_loss_fn(config.policy_loss.loss_mode)(
                    micro["old_log_probs"],
                    flat,
                    micro["advantages"],
                    micro["response_mask"],
                    mode,
                    config,
                    **{name: column[taken] for name, column in prepared.items()},
                )
                entropy = agg_loss(
                    flat.exp(), micro["response_mask"], mode, **config.global_batch_info
                )
                (loss - 0.1 * entropy).backward()
        gradients.append(log_probs.grad)
    return gradients


def whole_sessions(
    rows: dict[str, Tensor], plan: UpdatePlan, step: StepPlan, log_probs: Tensor, case: str
) -> dict[str, Tensor]:
    """What the actor prepares of a step for losses on whole sequences, as columns of all rows."""
    config = actor(case)
    if SESSION_INDEX not in rows or not compares_sequences(config):
        return {}
    ranks = range(len(step.passes))
    taken = [plan.rows_of(rank)[at] for rank in ranks for at in step.rows_of(rank)]
    made = prepare_sessions(
        log_prob=log_probs.detach().flatten()[rows["token"][taken].clamp(min=0)],
        old_log_prob=rows["old_log_probs"][taken],
        advantages=rows["advantages"][taken],
        response_mask=rows["response_mask"][taken],
        session_index=rows[SESSION_INDEX][taken],
        config=config,
    )
    columns = {}
    for name, values in made.items():
        columns[name] = values.new_zeros(len(rows["token"]), *values.shape[1:])
        columns[name][taken] = values
    return columns


def with_advantages(batch: DataProto, estimator: str) -> DataProto:
    return compute_advantage(
        batch, estimator, gamma=0.9, lam=0.8, num_repeat=NUM_SAMPLES, config=AlgoConfig(gamma=0.9)
    )


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    assert len(found) == len(expected)
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("estimator", EVERY_ESTIMATOR)
@pytest.mark.parametrize(
    "seeds", [range(1), pytest.param(range(1, 40), marks=pytest.mark.slow)], ids=["one", "many"]
)
def test_no_cut_changes_the_gradient(estimator: str, dtype: torch.dtype, seeds: range):
    # Positions of this one are those of the response; there are others in every row.
    has_tools = estimator != "optimal_token_baseline"
    for seed in seeds:
        sessions = sampled(seed, dtype, has_tools=has_tools)
        chooser = random.Random(seed)
        uncut = with_advantages(sessions.uncut(), estimator)
        cut = with_advantages(sessions.cut(chooser), estimator)
        for mode in LOSS_AGG_MODES:
            per_step = chooser.choice([5, NUM_PROMPTS * NUM_SAMPLES])
            expected = gradient(sessions, uncut, mode, chooser=None, sessions_per_step=per_step)
            assert all(part.abs().max() > 0 for part in expected)
            found = gradient(sessions, cut, mode, chooser=chooser, sessions_per_step=per_step)
            assert worst(found, expected) < TOLERANCE[dtype], (seed, mode)


@pytest.mark.parametrize("estimator", EVERY_ESTIMATOR)
def test_rows_that_count_as_samples_would_change_it(estimator: str):
    sessions = sampled(0, torch.float64, has_tools=estimator != "optimal_token_baseline")
    uncut = with_advantages(sessions.uncut(), estimator)
    cut = sessions.cut(random.Random(0))
    del cut.non_tensor_batch["session_uid"]
    if estimator == "grpo_passk":  # the best row of a prompt is not the best session
        cut.batch["token_level_rewards"] += 1e-3 * torch.rand(len(cut), 1)
    cut = with_advantages(cut, estimator)
    for mode in LOSS_AGG_MODES:
        expected = gradient(sessions, uncut, mode, chooser=None)
        found = gradient(sessions, cut, mode, chooser=None, sessions_per_step=len(cut))
        assert worst(found, expected) > 0.01, mode


def test_only_aggregation_by_sequence_must_know_of_sessions():
    sessions = sampled(0, torch.float64)
    uncut = with_advantages(sessions.uncut(), "grpo")
    cut = with_advantages(sessions.cut(random.Random(0)), "grpo")
    by_row = DataProto(batch=cut.batch.copy())
    differs = {}
    for mode in LOSS_AGG_MODES:
        expected = gradient(sessions, uncut, mode, chooser=None)
        found = gradient(sessions, by_row, mode, chooser=None, sessions_per_step=len(cut))
        differs[mode] = worst(found, expected) > 1e-12
    assert differs == {
        "token-mean": False,
        "seq-mean-token-sum": True,
        "seq-mean-token-mean": True,
        "seq-mean-token-sum-norm": False,
        "token-sum": False,
    }


def test_a_direct_call_counts_the_sessions_it_is_given():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    loss = torch.tensor([[1.0, 2, 0], [6, 0, 0], [1, 1, 1]])
    tokens = torch.tensor([3, 3, 3])
    assert agg_loss(loss, mask, "seq-mean-token-sum", sequence_tokens=tokens) == (9 + 3) / 2
    assert agg_loss(loss, mask, "seq-mean-token-mean", sequence_tokens=tokens) == (3 + 1) / 2


@pytest.mark.parametrize("rollout_rs", ["seq_mean_k1", "seq_sum_k1", "token_k1"])
@pytest.mark.parametrize("rollout_is", ["sequence", "token"])
def test_rollout_correction_takes_a_session_for_the_sequence(rollout_is: str, rollout_rs: str):
    config = RolloutCorrectionConfig(
        rollout_is=rollout_is, rollout_rs=rollout_rs, rollout_rs_threshold="0.6_1.7"
    )
    sessions = sampled(1, torch.float64)
    uncut, metrics = compute_rollout_correction_and_add_to_batch(sessions.uncut(), config)
    cut, cut_metrics = compute_rollout_correction_and_add_to_batch(
        sessions.cut(random.Random(1)), config
    )
    assert cut_metrics == pytest.approx(metrics, rel=1e-9)
    for name in ("rollout_is_weights", "response_mask"):
        assert by_token(cut, name) == pytest.approx(by_token(uncut, name), rel=1e-9)


def by_token(batch: DataProto, name: str) -> list[float]:
    """The values of a column by sampled token; those of rows that only repeat it are 0."""
    tokens, values = batch.batch["token"].flatten(), batch.batch[name].flatten().double()
    sums = torch.zeros(NUM_PROMPTS * NUM_SAMPLES * LENGTH, dtype=torch.float64)
    return sums.index_add_(0, tokens.clamp(min=0), torch.where(tokens >= 0, values, 0)).tolist()


def test_the_kl_in_the_reward_is_a_mean_over_sessions():
    sessions = sampled(2, torch.float64)
    found = []
    for batch in (sessions.uncut(), sessions.cut(random.Random(2))):
        _, metrics = apply_kl_penalty(batch, FixedKLController(0.1))
        found.append(metrics["actor/reward_kl_penalty"])
    assert found[1] == pytest.approx(found[0], rel=1e-12)


def test_policy_filtration_draws_sessions_with_all_their_rows():
    sessions = sampled(3, torch.float64)
    cut = sessions.cut(random.Random(3))
    drawn = compute_pf_ppo_reweight_data(cut, generator=torch.Generator().manual_seed(0))
    names = drawn.non_tensor_batch["session_uid"].tolist()
    assert len(set(names)) == NUM_PROMPTS * NUM_SAMPLES
    assert len({name.partition("#")[0] for name in names}) < NUM_PROMPTS * NUM_SAMPLES
    rows_of = {name: cut.non_tensor_batch["session_uid"].tolist().count(name) for name in
               set(cut.non_tensor_batch["session_uid"])}  # fmt: skip
    assert all(names.count(name) == rows_of[name.partition("#")[0]] for name in names)


WHOLE_SEQUENCE_CASES = [
    "gspo",
    "geo_mean",
    "bypass ppo_clip",
    "bypass gspo",
    "bypass geo_mean",
    "bypass geo_mean, rejected",
    "bypass reinforce, token",
    "bypass reinforce, sequence",
    "bypass reinforce, token, normalized",
    "bypass reinforce, sequence, normalized",
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", WHOLE_SEQUENCE_CASES)
def test_no_cut_changes_the_gradient_of_losses_on_whole_sequences(case: str, dtype: torch.dtype):
    for seed in range(3):
        sessions = sampled(seed, dtype)
        chooser = random.Random(seed)
        uncut = with_advantages(sessions.uncut(), "grpo")
        cut = with_advantages(sessions.cut(chooser), "grpo")
        per_step = chooser.choice([5, NUM_PROMPTS * NUM_SAMPLES])
        options = {"sessions_per_step": per_step, "case": case}
        expected = gradient(sessions, uncut, "seq-mean-token-sum", chooser=None, **options)
        found = gradient(sessions, cut, "seq-mean-token-sum", chooser=chooser, **options)
        assert all(part.abs().max() > 0 for part in expected)
        assert worst(found, expected) < TOLERANCE[dtype], seed


def test_weights_of_sessions_are_divided_by_their_mean_over_the_step():
    """Ratios 1.2 * 1 and 0.4 of two sessions, the first in two rows: weights as they, mean 0.8."""
    mask = torch.tensor([[1, 0], [1, 0], [1, 0]])
    new = torch.tensor([[1.2, 9.0], [1.0, 9.0], [0.4, 9.0]]).log()
    config = actor("bypass reinforce, sequence, normalized")
    made = prepare_sessions(
        log_prob=new,
        old_log_prob=torch.zeros(3, 2),
        advantages=torch.ones(3, 2),
        response_mask=mask,
        session_index=torch.tensor([4, 4, 7]),
        config=config,
    )
    assert made["session_weights"][:, 0].tolist() == pytest.approx([1.5, 1.5, 0.5])
    config.global_batch_info = {"batch_num_tokens": 3, "global_batch_size": 2, "dp_size": 1}
    losses = []
    for row in range(3):  # each a pass of its own, which does not know the others' weights
        one = slice(row, row + 1)
        loss_fn = get_policy_loss_fn(config.policy_loss.loss_mode)
        columns = (torch.zeros(1, 2), new[one], torch.ones(1, 2), mask[one])
        loss, metrics = loss_fn(
            *columns, "token-mean", config, session_weights=made["session_weights"][one]
        )
        assert "rollout_corr/rollout_is_batch_norm_factor" not in metrics, "not that of the step"
        losses.append(float(loss))
    logs = [math.log(1.2), 0.0, math.log(0.4)]
    expected = [-weight * log / 3 for weight, log in zip((1.5, 1.5, 0.5), logs, strict=True)]
    assert losses == pytest.approx(expected)


@pytest.mark.parametrize("case", WHOLE_SEQUENCE_CASES)
def test_rows_that_count_as_sequences_would_change_it(case: str):
    sessions = sampled(0, torch.float64)
    uncut = with_advantages(sessions.uncut(), "grpo")
    cut = with_advantages(sessions.cut(random.Random(0)), "grpo")
    by_row = DataProto(batch=cut.batch.copy())
    mode = "seq-mean-token-sum-norm"  # which does not count sequences
    expected = gradient(sessions, uncut, mode, chooser=None, case=case)
    found = gradient(sessions, by_row, mode, chooser=None, sessions_per_step=len(cut), case=case)
    assert worst(found, expected) > 0.01


def test_a_session_keeps_its_rows_in_one_optimizer_step():
    labels = [0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 4]
    plan = plan_update(
        [3] * 11, [1, 0, 2] + [1] * 8, rows_per_step=2, micro_batching=MicroBatching(rows=2),
        num_ranks=2, shuffle_seed=3, epochs=2, sessions=labels,
    )  # fmt: skip
    assert len(plan.steps) == 6
    for step in plan.steps:
        rows = [plan.rows_of(rank)[at] for rank in range(2) for at in step.rows_of(rank)]
        members = {labels[row] for row in rows}
        assert sorted(rows) == [row for row, label in enumerate(labels) if label in members]
        assert step.global_batch_size == len(members)


def test_sums_over_sessions_are_the_rows_themselves_without_them():
    batch = sampled(0, torch.float64).uncut()
    assert session_sums(batch.batch["values"], batch) is batch.batch["values"]
