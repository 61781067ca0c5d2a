"""DPO, SPPO and GVPO: numbers worked by hand, and the gradient of the plain loss in any split."""

import math
import random

import pytest
import torch
from torch import Tensor

from tests.registries import restored
from verl.algos.policy_losses.sequences import (
    COUPLED,
    SEQUENCE_LOSSES,
    compute_policy_loss_on_sequences,
    couples_prompts,
    is_on_sequences,
    prepare_sequences,
)
from verl.algos.registry import POLICY_LOSS_REGISTRY, register_policy_loss
from verl.config.actor import ActorConfig, PolicyLossConfig

F64 = torch.float64
NAN = math.nan


def actor(name: str, *, gvpo_beta: float = 0.5, **options) -> ActorConfig:
    return ActorConfig(
        policy_loss=PolicyLossConfig(loss_mode=name, gvpo_beta=gvpo_beta), dpo_beta=0.5, **options
    )


def prepared(config, log_prob, base, advantages, mask, sessions=None, prompts=None):
    rows = torch.arange(len(log_prob))
    return prepare_sequences(
        log_prob=log_prob,
        old_log_prob=base,
        ref_log_prob=base,
        advantages=advantages,
        response_mask=mask,
        session_index=rows if sessions is None else torch.tensor(sessions),
        prompt_index=torch.zeros_like(rows) if prompts is None else torch.tensor(prompts),
        config=config,
    )


def on_tokens(values: list[float], mask: Tensor) -> Tensor:
    return torch.tensor(values, dtype=F64)[:, None] * mask


# Two responses to one prompt; log-ratios 0.3 - 0.1 = 0.2 and -0.5, the masked token holds NaN.
MASK = torch.tensor([[1, 1], [1, 0]])
BASE = torch.tensor([[-1.0, -2.0], [-1.5, NAN]], dtype=F64)
LOG_PROB = torch.tensor([[-0.7, -2.1], [-2.0, NAN]], dtype=F64)


def by_hand(name, advantages=(1.0, -1.0), **options):
    config = actor(name, **options)
    columns = prepared(config, LOG_PROB, BASE, on_tokens(list(advantages), MASK), MASK)
    return {key: column.tolist() for key, column in columns.items()}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def close(values, expected):
    assert values == pytest.approx(expected, rel=0, abs=1e-12)


def test_dpo_by_hand():
    found = by_hand("dpo")  # margin 0.7, times beta 0.35
    loss = -math.log(sigmoid(0.35))
    close(found["sequence_loss"], [loss / 2, loss / 2])
    slope = -0.5 * sigmoid(-0.35)
    close(found["sequence_slope"], [slope, -slope])
    close(sum(found["dpo_margin"]), 0.35)
    close(sum(found["dpo_chosen_reward"]), 0.1)
    close(sum(found["dpo_rejected_reward"]), -0.25)
    assert sum(found["dpo_accuracy"]) == sum(found["dpo_num_pairs"]) == 1


def test_dpo_the_other_way_round_is_not_accurate():
    found = by_hand("dpo", advantages=(-1.0, 1.0))
    close(sum(found["sequence_loss"]), -math.log(sigmoid(-0.35)))
    assert sum(found["dpo_accuracy"]) == 0


def test_label_smoothing_by_hand():
    found = by_hand("dpo", dpo_label_smoothing=0.1)
    close(
        sum(found["sequence_loss"]),
        -0.9 * math.log(sigmoid(0.35)) - 0.1 * math.log(sigmoid(-0.35)),
    )
    slope = 0.5 * (-0.9 * sigmoid(-0.35) + 0.1 * sigmoid(0.35))
    close(found["sequence_slope"], [slope, -slope])


def test_ipo_by_hand():
    found = by_hand("dpo", dpo_loss_type="ipo")  # aims at a margin of 1 / (2 * 0.5) = 1
    close(sum(found["sequence_loss"]), 0.09)
    close(found["sequence_slope"], [-0.6, 0.6])


def test_without_a_reference_the_log_probs_are_compared():
    found = by_hand("dpo", dpo_reference_free=True)  # -2.8 against -2.0
    close(sum(found["dpo_margin"]), -0.4)


def test_an_advantage_of_zero_is_in_no_pair():
    found = by_hand("dpo", advantages=(0.0, -1.0))
    assert {sum(values) for values in found.values()} == {0}


def test_sppo_by_hand():
    found = by_hand("sppo", advantages=(0.25, -0.25), sppo_eta=2.0)  # targets 0.5 and -0.5
    close(found["sequence_loss"], [0.09 / 2, 0.0])
    close(found["sequence_slope"], [-0.3, 0.0])
    close(sum(found["sequence_residual"]), 0.15)
    close(sum(found["sequence_log_ratio"]), -0.15)


def test_gvpo_by_hand():
    # beta (h - mean) = +-0.5 * 0.35; rewards 1 and 0, so +-0.5: residuals -0.325 and 0.325
    found = by_hand("gvpo", advantages=(1.0, 0.0))
    close(found["sequence_loss"], [0.325**2 / 2] * 2)
    close(found["sequence_slope"], [-0.1625, 0.1625])


def test_gvpo_does_not_see_what_a_prompt_adds_to_all_of_its_rewards():
    close(
        by_hand("gvpo", advantages=(101.0, 100.0))["sequence_slope"],
        by_hand("gvpo", advantages=(1.0, 0.0))["sequence_slope"],
    )


# ---- any split -----------------------------------------------------------------------------------

SESSIONS = [0, 0, 1, 2, 3, 3, 3, 4, 5, 6]
PROMPTS = [0, 0, 0, 0, 1, 1, 1, 1, 1, 2]
OPTIONS = {"dpo": {}, "dpo ipo": {"dpo_loss_type": "ipo"}, "sppo": {"sppo_eta": 1.7}, "gvpo": {}}


def random_rows(seed=0):
    """Ten rows of seven sessions to three prompts; row 7, a whole session, has no token."""
    generator = torch.Generator().manual_seed(seed)
    log_prob, base = (-torch.rand(10, 5, generator=generator, dtype=F64) * 3 for _ in range(2))
    mask = (torch.rand(10, 5, generator=generator) > 0.2).long()
    mask[7] = 0
    of_session = torch.randn(7, generator=generator, dtype=F64)
    return log_prob, base, of_session[torch.tensor(SESSIONS)][:, None] * mask, mask


def plain_loss(config, log_prob, base, advantages, mask):
    """The loss as papers write it, one session after another."""
    h, reward, prompt = {}, {}, {}
    for row, (session, label) in enumerate(zip(SESSIONS, PROMPTS, strict=True)):
        if mask[row].any():
            h[session] = h.get(session, 0) + ((log_prob - base)[row] * mask[row]).sum()
            reward[session] = advantages[row][mask[row].bool()][0]
            prompt[session] = label
    terms = []
    if config.policy_loss.loss_mode == "sppo":
        terms = [(h[s] - config.sppo_eta * reward[s]) ** 2 for s in h]
    if config.policy_loss.loss_mode == "gvpo":
        for s in h:
            peers = [p for p in h if prompt[p] == prompt[s]]
            mean_h, mean_r = (sum(x[p] for p in peers) / len(peers) for x in (h, reward))
            terms.append((0.5 * (h[s] - mean_h) - (reward[s] - mean_r)) ** 2)
    if config.policy_loss.loss_mode == "dpo":
        for won, lost in ((w, v) for w in h for v in h if prompt[w] == prompt[v]):
            if reward[won] > 0 > reward[lost]:
                margin = h[won] - h[lost]
                is_ipo = config.dpo_loss_type == "ipo"
                terms.append((margin - 1) ** 2 if is_ipo else -torch.sigmoid(0.5 * margin).log())
    return sum(terms) / len(terms)


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_gradient_is_that_of_the_plain_loss_in_any_split(case, num_ranks):
    config = actor(case.split()[0], **OPTIONS[case], global_batch_info={"dp_size": num_ranks})
    log_prob, base, advantages, mask = random_rows()
    leaf = log_prob.clone().requires_grad_()
    expected = plain_loss(config, leaf, base, advantages, mask)
    (gradient,) = torch.autograd.grad(expected, leaf)
    assert gradient.abs().sum() > 0.1
    columns = prepared(config, log_prob, base, advantages, mask, SESSIONS, PROMPTS)
    chooser = random.Random(num_ranks)
    for _ in range(4):
        parts: dict[tuple[int, int], list[int]] = {(rank, 0): [] for rank in range(num_ranks)}
        for row in chooser.sample(range(10), 10):
            part = (chooser.randrange(num_ranks), chooser.randrange(3))
            parts.setdefault(part, []).append(row)
        leaf, total = log_prob.clone().requires_grad_(), 0.0
        for rows in parts.values():
            loss, _ = compute_policy_loss_on_sequences(
                base[rows],
                leaf[rows],
                advantages[rows],
                mask[rows],
                config=config,
                **{name: column[rows] for name, column in columns.items()},
            )
            (loss / num_ranks).backward()
            total += loss.item() / num_ranks
        torch.testing.assert_close(leaf.grad, gradient, rtol=0, atol=1e-12)
        close(total, expected.item())


@pytest.mark.parametrize("name", SEQUENCE_LOSSES)
def test_rows_may_come_in_any_order(name):
    """Each rank sees its own rows first."""
    config = actor(name)
    log_prob, base, advantages, mask = random_rows()
    columns = prepared(config, log_prob, base, advantages, mask, SESSIONS, PROMPTS)
    order = random.Random(3).sample(range(10), 10)
    others = prepared(
        config,
        *(column[order] for column in (log_prob, base, advantages, mask)),
        [SESSIONS[row] for row in order],
        [PROMPTS[row] for row in order],
    )
    for key, column in columns.items():
        torch.testing.assert_close(others[key], column[order], rtol=0, atol=1e-12)


def test_called_without_columns_of_the_whole_step_it_says_what_is_missing():
    with pytest.raises(ValueError, match="prepare_sequences"):
        compute_policy_loss_on_sequences(BASE, LOG_PROB, BASE, MASK, config=actor("dpo"))


def test_a_missing_reference_is_named():
    rows = torch.arange(2)
    with pytest.raises(ValueError, match="no ref_log_prob"):
        prepare_sequences(
            log_prob=LOG_PROB,
            old_log_prob=BASE,
            advantages=BASE,
            response_mask=MASK,
            session_index=rows,
            prompt_index=rows,
            config=actor("dpo"),
        )


def test_a_users_loss_of_the_same_name_is_not_prepared():
    assert [name for name in SEQUENCE_LOSSES if couples_prompts(actor(name))] == list(COUPLED)
    with restored(POLICY_LOSS_REGISTRY):
        register_policy_loss("dpo")(lambda **columns: (torch.tensor(0.0), {}))
        assert not is_on_sequences(actor("dpo"))
