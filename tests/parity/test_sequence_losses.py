"""DPO, SPPO and GVPO have one gradient, on one rank or several: that of a padded batch.

The expected one is plain autograd through transformers' model, with the losses written out.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.parity import models
from tests.parity.combinations import Combination, Setup
from tests.parity.reference import TEMPERATURE
from tests.parity.rows import PROMPT, batch
from tests.parity.updates import build_engine, plan_of, whole_gradients
from tests.utils.two_ranks import run_on_ranks
from verl.config.actor import FSDPActorConfig, PolicyLossConfig
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.engine.inputs import PROMPT_INDEX

# Prompts of the rows 0 1 0 2 1 0 3; row 4 has no token, so its prompt has no pair.
ADVANTAGES = (1.0, 1.0, -1.0, 0.5, -1.0, -0.5, -1.0)
PROMPTS = (0, 1, 0, 2, 1, 0, 3)
PAIRS = ((0, 2), (0, 5))
ANSWERED = (0, 1, 2, 3, 5, 6)
BETA, ETA = 0.4, 1.5
LOSSES = ("dpo", "sppo", "gvpo")


def rows():
    data = batch("many prompts").exclude("ce_weights", "positive_weights")
    data["advantages"] = torch.tensor(ADVANTAGES)[:, None] * data["response_mask"]
    data[PROMPT_INDEX] = torch.tensor(PROMPTS)
    return data


def plain_loss(model: PreTrainedModel, name: str) -> Tensor:
    data = rows()
    output = model(
        input_ids=data["input_ids"],
        attention_mask=data["attention_mask"],
        position_ids=data["position_ids"],
        use_cache=False,
    )
    log_p = (output.logits[:, PROMPT - 1 : -1] / TEMPERATURE).log_softmax(-1)
    log_prob = log_p.gather(-1, data["responses"][..., None]).squeeze(-1)
    base = data["ref_log_prob" if name == "dpo" else "old_log_probs"]
    h = ((log_prob - base) * data["response_mask"]).sum(-1)
    if name == "dpo":
        terms = [-torch.sigmoid(BETA * (h[w] - h[v])).log() for w, v in PAIRS]
    elif name == "sppo":
        terms = [(h[row] - ETA * ADVANTAGES[row]) ** 2 for row in ANSWERED]
    else:
        values = BETA * h - torch.tensor(ADVANTAGES)
        groups = [[row for row in ANSWERED if PROMPTS[row] == PROMPTS[r]] for r in ANSWERED]
        centred = zip(ANSWERED, groups, strict=True)
        terms = [(values[r] - values[group].mean()) ** 2 for r, group in centred]
    return torch.stack(terms).mean()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("models")
    models.save_models(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "llama" / "actor", attn_implementation="eager"
    ).eval()
    found = {}
    for name in LOSSES:
        loss = plain_loss(model, name)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        names = [name for name, _ in model.named_parameters()]
        found[name] = (loss.item(), dict(zip(names, gradients, strict=True)))
    return folder, found


def deviations(folder: Path, expected, sharding: str, num_ranks: int, rank: int) -> list[float]:
    """Of every loss and split, the largest deviation of the gradient, and of the loss."""
    setup = Setup(
        num_ranks=num_ranks,
        ranks_per_sequence=1,
        sharding=sharding,
        prefix_sharing=True,
        architecture="llama",
        role="actor",
        adapters=False,
    )
    engine = build_engine(setup, folder, None)
    found = []
    for name, (loss, gradients) in expected.items():
        for cut in ("rows", "tokens"):
            data = rows()
            case = Combination(setup=setup, cut=cut, aggregation="token-mean", rows="many prompts")
            plan = plan_of(case, data, engine)
            policy = DataParallelPPOActor(
                FSDPActorConfig(
                    policy_loss=PolicyLossConfig(loss_mode=name, gvpo_beta=BETA),
                    dpo_beta=BETA,
                    sppo_eta=ETA,
                ),
                engine,
            )
            metrics = policy.update_policy(
                data[plan.rows_of(engine.get_data_parallel_rank())],
                rows_per_step=len(data),
                temperature=TEMPERATURE,
                plan=plan,
            )
            own = whole_gradients(engine, gradients)
            largest = max(value.abs().max() for value in gradients.values())
            worst = max((own[key] - value).abs().max() for key, value in gradients.items())
            found += [(worst / largest).item(), abs(metrics["actor/pg_loss"] - loss)]
    return found


@pytest.mark.parametrize(
    ("sharding", "num_ranks"),
    [("none", 1), ("zero1", 2), pytest.param("full", 2, marks=pytest.mark.slow)],
)
def test_the_gradient_of_a_mini_batch_is_that_of_the_padded_batch(
    expected, tmp_path, sharding, num_ranks
):
    folder, losses = expected
    work = partial(deviations, folder, losses, sharding, num_ranks)
    answers = [work(0)] if num_ranks == 1 else run_on_ranks(num_ranks, work, tmp_path)
    assert max(max(found) for found in answers) < 1e-5
