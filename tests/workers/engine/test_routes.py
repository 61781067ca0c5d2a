"""Expert routes in an update: replay, load, auxiliary loss."""

import pytest
import torch
import torch.nn.functional as F

from tests.tiny_models import plain_twin, tiny_model
from tests.workers.actor.test_dp_actor import ALL_ROWS, PROMPT, ROWS, batch, update
from verl.config.actor import FSDPActorConfig, RouterReplayConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.experts import set_aux_loss
from verl.models.routing import Routing
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.engine.inputs import PROMPT_INDEX, ModelInputs
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.routes import (
    ROUTED_EXPERTS,
    ExpertLoad,
    RouteOptions,
    load_metrics,
    packed_routes,
    prepare_replay,
    routes_of_rows,
    token_places,
)

KIND = "qwen3_moe"


def actor(aux_loss_coef=0.0, prefix_sharing=False, **options):
    def build():
        model = tiny_model(KIND, router_aux_loss_coef=aux_loss_coef)
        return set_aux_loss(model, {"router_aux_loss_coef": aux_loss_coef})

    optim = FSDPOptimizerConfig(lr=0.01, weight_decay=0.0, optimizer="SGD")
    engine = OneDeviceEngine(build, optim, prefix_sharing=prefix_sharing)
    engine.initialize()
    return DataParallelPPOActor(FSDPActorConfig(**options), engine)


def shared_prompts():
    data = batch()
    data["input_ids"][1::2, :PROMPT] = data["input_ids"][::2, :PROMPT]
    data[PROMPT_INDEX] = torch.arange(ROWS) // 2
    return data


def with_old(built, data):
    columns = built.compute_log_prob(data, micro_batching=ALL_ROWS, temperature=1.0)
    columns["old_log_probs"] = columns.pop("log_probs")
    return data.copy().update(columns)


def weights(built):
    return torch.cat([p.detach().flatten() for p in built.engine.module.parameters()])


@pytest.mark.parametrize("prefix_sharing", [False, True])
def test_routes_of_packed_tokens_come_back_to_their_rows(prefix_sharing):
    data = shared_prompts()
    inputs = ModelInputs.of(data, prefix_sharing=prefix_sharing)
    places = token_places(data, inputs)
    real = data["attention_mask"].bool()
    assert torch.equal(inputs.input_ids[places[real]], data["input_ids"][real])
    routes = torch.randint(4, (len(inputs.input_ids), 2, 3))
    rows = routes_of_rows(routes, places)
    assert rows.shape == (*real.shape, 2, 3)
    assert torch.equal(packed_routes(rows, places, len(routes)).long(), routes)


def test_the_auxiliary_loss_is_that_of_a_loop_over_rows():
    built, data = actor(aux_loss_coef=0.5), batch()
    engine, twin = built.engine, plain_twin(tiny_model(KIND))
    columns = engine.forward(data, 1.0)
    expected = []
    for row in range(ROWS):
        num = int(data["attention_mask"][row].sum())
        ids = data["input_ids"][row : row + 1, :num]
        with torch.no_grad():
            output = twin(ids, output_router_logits=True, use_cache=False)
        losses = []
        for logits in output.router_logits:
            probs = logits.softmax(-1)[PROMPT - 1 : num - 1]
            chosen = F.one_hot(probs.topk(2).indices, 4).sum(1).float()
            losses.append(4 * (chosen.mean(0) * probs.mean(0)).sum() if len(probs) else 0.0)
        expected.append(sum(losses) / len(losses))
    torch.testing.assert_close(
        columns["router_aux_loss"].detach(), torch.tensor(expected), rtol=1e-4, atol=1e-4
    )


def test_an_update_with_auxiliary_loss_does_not_depend_on_micro_batches_or_shared_prompts():
    results = []
    for num_rows, sharing in ((8, False), (3, False), (2, True)):
        built = actor(0.5, sharing, ppo_micro_batch_size_per_gpu=num_rows)
        metrics = update(built, with_old(built, shared_prompts()), rows_per_step=ROWS)
        results.append((metrics, weights(built)))
    plain = actor()
    update(plain, with_old(plain, shared_prompts()), rows_per_step=ROWS)
    moved = (results[0][1] - weights(plain)).abs().max()
    assert moved > 1e-5, "the auxiliary loss has a gradient"
    for metrics, after in results[1:]:
        assert (after - results[0][1]).abs().max() < 1e-3 * moved
        assert metrics == pytest.approx(results[0][0], rel=1e-3, abs=1e-5)
    assert results[0][0]["actor/router_aux_loss"] > 0


def test_load_metrics_are_those_of_counts_by_hand():
    load = ExpertLoad(torch.tensor([[2.0, 2.0, 2.0, 2.0], [8.0, 0.0, 0.0, 0.0]]), [1, 2])
    assert load_metrics(load) == {
        "actor/expert_load_max/layer_1": 1.0,
        "actor/expert_load_max/layer_2": 4.0,
        "actor/expert_load_max": 4.0,
        "actor/expert_load_max_mean": 2.5,
        "actor/idle_experts": 3 / 8,
    }
    assert load_metrics(load) == {}, "they were read"


def test_an_update_reports_the_load_of_each_layer():
    built = actor()
    metrics = update(built, with_old(built, batch()), rows_per_step=4)
    assert metrics["actor/expert_load_max/layer_0"] >= 1
    assert metrics["actor/expert_load_max/layer_1"] <= metrics["actor/expert_load_max"]


def test_r2_replays_the_routes_of_the_old_policy():
    """After a large step the routers would choose otherwise; tokens go where they went before."""
    built = actor(router_replay=RouterReplayConfig(mode="R2"), ppo_micro_batch_size_per_gpu=3)
    data = with_old(built, batch())
    assert data[ROUTED_EXPERTS].dtype == torch.uint8
    assert data[ROUTED_EXPERTS].shape == (ROWS, data["input_ids"].shape[1], 2, 2)
    with torch.no_grad():
        for name, parameter in built.engine.module.named_parameters():
            if name.endswith("gate.weight"):
                parameter.neg_()
    metrics = update(built, data, rows_per_step=ROWS)
    assert metrics["actor/router_mismatch"] > 0.5
    routing = Routing.of(built.engine.module)
    places = token_places(data[6:], ModelInputs.of(data[6:], prefix_sharing=False))
    given = packed_routes(data[ROUTED_EXPERTS][6:], places, int(places.max()) + 1)
    replayed = torch.stack([layer.replayed for layer in routing.layers], 1)
    assert torch.equal(replayed, given), "those of the last micro-batch"
    assert routing.layers[0].logits is None, "a pass leaves nothing behind"


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (lambda column: column.zero_(), "sends a token to one expert twice"),
        (lambda column: column.add_(3), r"names expert \d, but the model has 4"),
        (lambda column: column[:, :, :1], "has routes of 1 layers"),
    ],
)
def test_routes_that_no_router_of_the_model_gave_are_refused(routes, message):
    built = actor(router_replay=RouterReplayConfig(mode="R2"))
    data = with_old(built, batch())
    data[ROUTED_EXPERTS] = routes(data[ROUTED_EXPERTS])
    with pytest.raises(ValueError, match=message):
        update(built, data, rows_per_step=ROWS)


def test_an_update_by_r3_without_routes_is_refused():
    data = batch()
    built = actor(router_replay=RouterReplayConfig(mode="R3"))
    data["old_log_probs"] = with_old(built, data)["old_log_probs"]
    with pytest.raises(ValueError, match="mode is R3, but the batch has no column routed_experts"):
        update(built, data, rows_per_step=ROWS)


def test_in_exact_mode_replay_is_an_assertion():
    options = RouteOptions(Routing([]), must_agree=True)
    options.check(0.0)
    with pytest.raises(RuntimeError, match="other experts"):
        options.check(0.25)


@pytest.mark.parametrize(
    ("mode", "is_exact", "expected"),
    [("R3", True, True), ("R3", False, False), ("R2", True, False), ("disabled", True, False)],
)
def test_replay_is_an_assertion_for_routes_of_generation_in_exact_mode(mode, is_exact, expected):
    engine = actor().engine
    prepare_replay(engine, mode, is_exact=is_exact)
    assert engine.routes.must_agree is expected
