"""A model is trained on batches with a loss function of the caller's."""

import pytest
import torch

from tests.tiny_tokenizer import save_tiny_model
from verl.config.engine import FSDPEngineConfig, TrainingWorkerConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.protocol import DataProto
from verl.single_controller import ClassWithInitArgs, ResourcePool
from verl.single_controller.local import LocalWorkerGroup
from verl.utils.metric import reduce_metrics
from verl.workers.engine_workers import TrainingWorker

PROMPT, RESPONSE, ROWS = 3, 5, 6


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def imitate(model_output, data, dp_group):
    """-log p per response token of the whole step."""
    log_probs, mask = model_output["log_probs"], data["response_mask"]
    hits = (log_probs.detach() > -0.7).float() * mask
    loss = -(log_probs * mask).sum() / data["batch_num_tokens"] * data["dp_size"]
    return loss, {"train/likely": hits.sum() / mask.sum()}


def regress(model_output, data, dp_group):
    mask = data["response_mask"]
    errors = (model_output["values"] - data["returns"]).square() * mask
    return errors.sum() / data["batch_num_tokens"], {}


def config(model_path, *, optimizer="SGD", rows=2, **changes):
    return TrainingWorkerConfig(
        model_config=HFModelConfig(path=model_path),
        engine_config=FSDPEngineConfig(use_dynamic_bsz=False, micro_batch_size_per_gpu=rows),
        optimizer_config=FSDPOptimizerConfig(lr=0.05, optimizer=optimizer, weight_decay=0.0),
        **changes,
    )


def group(config, num_ranks=1, loss_fn=imitate):
    built = LocalWorkerGroup(
        ResourcePool([num_ranks]), ClassWithInitArgs(TrainingWorker, config, device="cpu")
    )
    built.reset()
    built.set_loss_fn(loss_fn)
    return built


def batch(**meta):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 90, (ROWS, PROMPT + RESPONSE), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(ROWS):
        mask[row, PROMPT + 1 + row % RESPONSE :] = 0
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
            "responses": ids[:, PROMPT:],
            "response_mask": mask[:, PROMPT:],
            "returns": torch.ones(ROWS, RESPONSE),
        },
        meta_info=meta,
    )


def weights(workers):
    module = workers.workers[0].engine.module
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same(one, other, atol=1e-6):
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=atol)


def metrics(future):
    return reduce_metrics(future.get().meta_info["metrics"])


def test_a_step_reports_the_loss_before_it_and_lowers_the_loss(model_path):
    workers = group(config(model_path))
    rows = batch()
    mask = rows.batch["response_mask"]
    before = workers.infer_batch(rows).get().batch["log_probs"]
    said = metrics(workers.train_batch(rows))
    assert said["loss"] == pytest.approx(float(-(before * mask).sum() / mask.sum()), abs=1e-5)
    assert said["train/likely"] == pytest.approx(float((before > -0.7)[mask > 0].float().mean()))
    assert (said["lr"], said["num_optimizer_steps"]) == (0.05, 1)
    after = workers.infer_batch(rows).get().batch["log_probs"]
    assert float((after * mask).sum()) > float((before * mask).sum())


def test_neither_micro_batches_nor_the_kind_of_batch_change_a_step(model_path):
    by_two, all_at_once = group(config(model_path)), group(config(model_path, rows=ROWS))
    metrics(by_two.train_batch(batch()))
    metrics(all_at_once.train_batch(batch().to_tensordict()))
    assert_same(weights(by_two), weights(all_at_once))
    by_tokens = group(config(model_path))
    metrics(by_tokens.train_batch(batch(use_dynamic_bsz=True, max_token_len_per_gpu=12)))
    assert_same(weights(by_two), weights(by_tokens))


def test_mini_batches_are_steps_of_their_rows(model_path):
    at_once, one_by_one = group(config(model_path)), group(config(model_path))
    said = metrics(at_once.train_mini_batch(batch(mini_batch_size=4, epochs=2)))
    for _ in range(2):
        for part in (slice(0, 4), slice(4, 6)):
            metrics(one_by_one.train_batch(batch()[part]))
    assert said["num_optimizer_steps"] == 4
    assert_same(weights(at_once), weights(one_by_one))


def test_it_learns_starts_over_and_continues_from_a_checkpoint(model_path, tmp_path):
    workers = group(config(model_path, optimizer="AdamW"))
    start = weights(workers)
    losses = [metrics(workers.train_batch(batch()))["loss"] for _ in range(10)]
    assert losses[-1] < 0.2 < 4 < losses[0]
    workers.save_checkpoint(str(tmp_path))
    metrics(workers.train_batch(batch()))
    further = weights(workers)
    workers.reset()
    assert_same(weights(workers), start, atol=0)
    workers.load_checkpoint(str(tmp_path))
    metrics(workers.train_batch(batch()))
    assert_same(weights(workers), further, atol=0)


def test_a_value_model_is_trained_on_values(model_path):
    workers = group(config(model_path, model_type="value_model"), loss_fn=regress)
    losses = [metrics(workers.train_batch(batch()))["loss"] for _ in range(5)]
    assert losses[-1] < 0.5 * losses[0]
    rows = batch()
    values = workers.infer_batch(rows).get().batch["values"]
    assert torch.equal(values * rows.batch["response_mask"], values)


def test_what_is_missing_is_named(model_path):
    worker = TrainingWorker(config(model_path), device="cpu")
    with pytest.raises(ValueError, match="call reset first"):
        worker.infer_batch(batch())
    worker.reset()
    with pytest.raises(ValueError, match="call set_loss_fn first"):
        worker.train_batch(batch())
    worker.set_loss_fn(imitate)
    with pytest.raises(ValueError, match=r'needs meta_info\["mini_batch_size"\]'):
        worker.train_mini_batch(batch())
    with pytest.raises(ValueError, match="max_token_len_per_gpu is not set"):
        worker.train_batch(batch(use_dynamic_bsz=True))


@pytest.mark.slow
def test_two_ranks_make_the_step_of_one(model_path):
    one, two = group(config(model_path)), group(config(model_path), num_ranks=2)
    try:
        rows = batch(mini_batch_size=4)
        said, said_by_two = (metrics(g.train_mini_batch(rows)) for g in (one, two))
        assert said_by_two == pytest.approx(said, abs=1e-5)
        columns, columns_of_two = (g.infer_batch(rows).get().batch for g in (one, two))
        torch.testing.assert_close(
            columns_of_two["log_probs"], columns["log_probs"], rtol=0, atol=1e-5
        )
    finally:
        two.shutdown()
