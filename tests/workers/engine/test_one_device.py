"""The engine on one device: what it computes does not depend on how the rows are cut."""

import gc
import weakref

import pytest
import torch
from tensordict import TensorDict

from tests.tiny_models import VOCABULARY, plain_twin, tiny_model
from verl.config.optimizer import FSDPOptimizerConfig
from verl.workers.engine.base import BaseEngine, MicroBatching
from verl.workers.engine.one_device import OneDeviceEngine


def batch(num_rows=7, prompt_columns=6, response_columns=8):
    """Rows with prompts and responses of different lengths, padded on the outer sides."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(
        3, VOCABULARY, (num_rows, prompt_columns + response_columns), generator=generator
    )
    mask = torch.zeros_like(ids)
    for row in range(num_rows):
        prompt = 1 + int(torch.randint(prompt_columns, (1,), generator=generator))
        response = int(torch.randint(response_columns + 1, (1,), generator=generator)) if row else 0
        mask[row, prompt_columns - prompt : prompt_columns + response] = 1
    return TensorDict(
        {
            "input_ids": ids * mask,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
            "responses": (ids * mask)[:, prompt_columns:],
            "response_mask": mask[:, prompt_columns:],
            "weight": torch.randn(num_rows, response_columns, generator=generator),
        },
        batch_size=num_rows,
    )


def engine(model_type="llama", **options):
    config = FSDPOptimizerConfig(lr=0.1, optimizer="SGD", weight_decay=0.0)
    built = OneDeviceEngine(lambda: tiny_model(model_type), config, max_grad_norm=1e9, **options)
    built.initialize()
    return built


def weighted_sum(columns, rows):
    loss = (columns["log_probs"] * rows["weight"] + 0.1 * columns["entropy"]) * rows[
        "response_mask"
    ]
    return loss.sum() / 10, {"rows": len(rows)}


SPLITS = [
    MicroBatching(rows=7),
    MicroBatching(rows=1),
    MicroBatching(rows=3),
    MicroBatching(tokens=20),
]


def test_log_probs_are_those_of_an_unmodified_model_on_each_row_alone():
    built, data = engine(), batch()
    columns = built.infer_batch(data, micro_batching=MicroBatching(rows=3), temperature=0.7)
    twin = plain_twin(built.module)
    for row in data:
        real = row["attention_mask"].bool()
        ids, num_response = row["input_ids"][real], int(row["response_mask"].sum())
        log_probs = torch.log_softmax(twin(input_ids=ids[None]).logits[0] / 0.7, -1)
        expected = log_probs[:-1].gather(1, ids[1:, None])[len(ids) - 1 - num_response :, 0]
        index = int((data["input_ids"] == row["input_ids"]).all(1).nonzero()[0])
        got = columns["log_probs"][index]
        torch.testing.assert_close(got[:num_response], expected, rtol=1e-4, atol=1e-5)
        assert not got[num_response:].any()


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_step_is_the_same_for_every_way_to_cut_the_rows(model_type, checkpointing):
    moved = []
    for split in SPLITS:
        built = engine(model_type, gradient_checkpointing=checkpointing)
        result = built.train_batch(batch(), weighted_sum, micro_batching=split)
        assert result.is_applied
        assert sum(report["rows"] for report in result.metrics) == 7
        moved.append((result, {n: p.detach().clone() for n, p in built.module.named_parameters()}))
    reference, weights = moved[0]
    start = dict(tiny_model(model_type).named_parameters())
    assert any(not torch.equal(weights[name], start[name]) for name in weights), (
        "the step did something"
    )
    for result, others in moved[1:]:
        assert result.loss == pytest.approx(reference.loss, rel=1e-4)
        assert result.grad_norm == pytest.approx(reference.grad_norm, rel=1e-4)
        for name, weight in others.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=2e-5, msg=name)


def test_parameters_never_move_and_the_version_counts_applied_steps():
    built = engine()
    addresses = {name: p.data_ptr() for name, p in built.module.named_parameters()}
    built.train_batch(batch(), weighted_sum, micro_batching=SPLITS[0])
    assert built.policy_version == 1
    assert {name: p.data_ptr() for name, p in built.module.named_parameters()} == addresses


def test_a_loss_that_is_not_finite_changes_no_weight_and_no_version():
    built = engine()
    before = {name: p.detach().clone() for name, p in built.module.named_parameters()}
    result = built.train_batch(
        batch(),
        lambda columns, rows: (columns["log_probs"].sum() * float("nan"), {}),
        micro_batching=SPLITS[0],
    )
    assert not result.is_applied
    assert built.policy_version == 0
    assert all(torch.equal(p, before[name]) for name, p in built.module.named_parameters())


def test_a_value_model_gives_one_value_per_response_token_and_starts_at_zero(tmp_path):
    from transformers import AutoModelForTokenClassification

    from verl.models.loading import load_value_model

    plain_twin(tiny_model("llama")).save_pretrained(tmp_path)
    built = OneDeviceEngine(
        lambda: load_value_model(str(tmp_path)), FSDPOptimizerConfig(lr=0.1), is_value_model=True
    )
    built.initialize()
    data = batch()
    values = built.infer_batch(data, micro_batching=SPLITS[2])["values"]
    assert values.shape == data["responses"].shape
    assert not values.any()
    built.train_batch(
        data,
        lambda columns, rows: (
            ((columns["values"] - 1) * rows["response_mask"]).square().sum(),
            {},
        ),
        micro_batching=SPLITS[2],
    )
    moved = built.infer_batch(data, micro_batching=SPLITS[2])["values"]
    mask = data["response_mask"].bool()
    assert (moved[mask] > 0).any()
    assert not moved[~mask].any()
    built.module.save_pretrained(tmp_path / "critic")
    kept = load_value_model(str(tmp_path / "critic"))
    assert isinstance(
        kept, type(AutoModelForTokenClassification.from_pretrained(tmp_path / "critic"))
    )
    assert torch.equal(kept.score.weight, built.module.score.weight), "a trained head is kept"


def test_with_checkpointing_a_layer_runs_again_in_the_backward_pass():
    for checkpointing, expected in ((False, 1), (True, 2)):
        built, runs = engine(gradient_checkpointing=checkpointing), []
        built.module.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))  # noqa: B023
        built.train_batch(batch(), weighted_sum, micro_batching=MicroBatching(rows=7))
        assert len(runs) == expected


def test_an_engine_without_an_optimizer_refuses_to_train():
    frozen = OneDeviceEngine(lambda: tiny_model("llama"))
    frozen.initialize()
    assert not any(p.requires_grad for p in frozen.module.parameters())
    with pytest.raises(ValueError, match="without an optimizer"):
        frozen.train_batch(batch(), weighted_sum, micro_batching=SPLITS[0])


def test_an_engine_that_is_dropped_leaves_no_parameter_behind():
    def parameters_after_a_step():
        built = engine()
        built.train_batch(batch(), weighted_sum, micro_batching=MicroBatching(rows=3))
        return [weakref.ref(parameter) for parameter in built.module.parameters()]

    references = parameters_after_a_step()
    gc.collect()
    assert references
    assert not [reference for reference in references if reference() is not None]


def test_one_device_is_the_only_rank_of_its_data():
    engine = OneDeviceEngine(lambda: tiny_model("llama"))
    assert (engine.get_data_parallel_rank(), engine.get_data_parallel_size()) == (0, 1)
    assert engine.get_data_parallel_group() is None
    # An engine of one's own that says nothing about ranks is alone too.
    assert BaseEngine.get_data_parallel_rank(engine) == 0
    assert BaseEngine.get_data_parallel_size(engine) == 1
    assert BaseEngine.get_data_parallel_group(engine) is None
    assert engine.is_mp_src_rank_with_outputs()
