"""The loop of supervised fine-tuning: what is learnt, how often, and where it continues."""

import gc
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_models import plain_twin
from tests.trainer.sft_cases import SUMS, trainer, weights, write_model
from verl.trainer.sft.batches import lay_out, load_rows, rows_of_step
from verl.utils.checkpoint.layout import CheckpointMismatchError, CheckpointSaveError
from verl.utils.device import NEW_OBJECTS


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_the_first_loss_is_the_mean_over_the_tokens_of_all_responses(model_folder, tmp_path):
    sft = trainer(model_folder, tmp_path)
    twin = plain_twin(sft.engine.module)
    total, count = 0.0, 0
    indices = rows_of_step(0, num_rows=64, batch_size=8, seed=1)
    for index in indices:
        row = sft.train_dataset[index]
        ids = row["input_ids"][row["attention_mask"].bool()][None]
        log_probs = twin(ids).logits.detach()[0, :-1].log_softmax(-1)
        trained = row["loss_mask"][: ids.shape[1] - 1].bool()
        total -= float(log_probs.gather(1, ids[0, 1:, None])[trained].sum())
        count += int(trained.sum())
        assert count > 1
    assert sft.train_step(1)["train/loss"] == pytest.approx(total / count, rel=1e-5)


def test_a_model_that_knows_nothing_has_the_loss_of_a_guess(model_folder, tmp_path):
    sft = trainer(model_folder, tmp_path)
    with torch.no_grad():
        sft.engine.module.lm_head.weight.zero_()
    assert sft.mean_loss(sft.val_dataset) == pytest.approx(math.log(260), rel=1e-6)
    metrics = sft.train_step(1)
    assert metrics["train/loss"] == pytest.approx(5.560682, rel=1e-6)  # log of 260 tokens
    # a row is <user> a + b <assistant> c <end>; the last two are trained, three if c has two digits
    long = sum(a + b >= 10 for a, b in (SUMS[i] for i in first_rows()))
    assert metrics["train/trained_tokens"] == 8 * 2 + long
    assert metrics["train/global_tokens"] == 8 * 7 + long


def first_rows():
    return rows_of_step(0, num_rows=64, batch_size=8, seed=1)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    model_folder, tmp_path, caplog
):
    sft = trainer(model_folder, tmp_path)
    sft.train_step(1)
    with torch.no_grad():
        sft.engine.module.model.norm.weight[0] = torch.inf
    before = weights(sft)
    sft.train_step(2)
    assert sft.summary.num_skipped == 1
    assert "step 2 changed nothing" in caplog.text
    for name, value in weights(sft).items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_gradient_does_not_depend_on_the_micro_batch(model_folder, tmp_path, size):
    def gradient(rows):
        sft = trainer(model_folder, tmp_path, **{"data.micro_batch_size_per_gpu": rows})
        taken = {}
        step = sft.engine.optimizer.step

        def keep(*arguments):
            taken.update({n: p.grad.clone() for n, p in sft.engine.module.named_parameters()})
            return step(*arguments)

        sft.engine.optimizer.step = keep
        sft.train_step(1)
        return taken

    expected, found = gradient(8), gradient(size)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-7)


def test_training_lowers_the_loss_and_the_saved_model_has_it(model_folder, tmp_path):
    sft = trainer(model_folder, tmp_path, **{"trainer.total_training_steps": 30})
    before = sft.mean_loss(sft.val_dataset)
    sft.fit()
    after = sft.mean_loss(sft.val_dataset)
    assert after < 0.7 * before
    folder = sft.checkpoints.weights(30)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+3"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    ours = plain_twin(sft.engine.module)
    torch.testing.assert_close(model(ids).logits, ours(ids).logits)


def test_a_run_reports_what_sft_runs_report(model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    changes = {"trainer.logger": ["file"], "trainer.test_freq": 2, "optim.lr_warmup_steps": 2}
    trainer(model_folder, tmp_path, **changes).fit()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(
        {"train/loss", "train/lr(1e-3)", "train/time(s)", "train/grad_norm"} <= line["data"].keys()
        for line in lines
    )
    assert ["val/loss" in line["data"] for line in lines] == [False, True, False, True]
    # lr 1e-2 in thousandths: warm-up 0, 5; then a cosine from 10 over two steps
    rates = [line["data"]["train/lr(1e-3)"] for line in lines]
    assert rates == pytest.approx([0.0, 5.0, 10.0, 5.0])


def test_a_last_save_that_fails_ends_the_run_after_its_step_is_reported(
    model_folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    changes = {"trainer.logger": ["file"], "trainer.total_training_steps": 2}
    sft = trainer(model_folder, tmp_path, **changes)
    sft.checkpoints.store.root = tmp_path / "metrics.jsonl" / "not a folder"
    with pytest.raises(CheckpointSaveError, match="step 2 was not saved"):
        sft.fit()
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.0, 1.0, 1.0, 1.0, 1.0]),
        ("cosine", [0.0, 1.0, 0.8535534, 0.5, 0.1464466]),
        ("wsd", [0.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_schedules_warm_up_by_their_share_of_the_steps(model_folder, tmp_path, schedule, expected):
    changes = {
        "optim.lr": 1e-3,
        "optim.lr_warmup_steps_ratio": 0.2,
        "optim.lr_scheduler": schedule,
        "trainer.total_training_steps": 5,
    }
    sft = trainer(model_folder, tmp_path, **changes)
    rates = [sft.train_step(step)["train/lr(1e-3)"] for step in range(1, 6)]
    assert rates == pytest.approx(expected)
    if schedule == "wsd":  # the last tenth falls to the floor
        assert sft.engine.optimizer.learning_rate == pytest.approx(0.0, abs=1e-12)


def test_epochs_go_over_every_row_in_an_order_of_their_own(model_folder, tmp_path):
    sft = trainer(
        model_folder, tmp_path, **{"trainer.total_training_steps": None, "trainer.total_epochs": 2}
    )
    assert sft.total_steps == 16
    epochs = [
        [
            row
            for step in range(8 * epoch, 8 * epoch + 8)
            for row in rows_of_step(step, num_rows=64, batch_size=8, seed=1)
        ]
        for epoch in (0, 1)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(64))
    assert epochs[0] != epochs[1]
    assert rows_of_step(0, num_rows=64, batch_size=8, seed=2) != epochs[0][:8]


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(model_folder, tmp_path):
    changes = {"trainer.save_freq": 2, "optim.lr_scheduler": "wsd", "optim.lr_warmup_steps": 1}
    whole = trainer(model_folder, tmp_path, **changes)
    whole.fit()
    path = str(tmp_path / "checkpoints" / "global_step_2")
    changes |= {"trainer.default_local_dir": str(tmp_path / "other")}
    resumed = trainer(model_folder, tmp_path, **changes, **{"trainer.resume_from_path": path})
    resumed.fit()
    for name, value in weights(whole).items():
        assert torch.equal(weights(resumed)[name], value), name


def test_a_finished_run_is_not_trained_again(model_folder, tmp_path):
    first = trainer(model_folder, tmp_path)
    first.fit()
    again = trainer(model_folder, tmp_path)
    assert again.checkpoints.resume()[0] == 4
    for name, value in weights(first).items():
        assert torch.equal(weights(again)[name], value), name


def test_a_checkpoint_of_another_run_is_refused(model_folder, tmp_path):
    trainer(model_folder, tmp_path).fit()
    other = trainer(model_folder, tmp_path, **{"trainer.seed": 7})
    with pytest.raises(CheckpointMismatchError, match=r"trainer.seed was 1 and is 7"):
        other.fit()
    assert trainer(
        model_folder, tmp_path, **{"trainer.seed": 7, "trainer.resume_mode": "disable"}
    ).checkpoints.resume() == (0, 0)  # fmt: skip


def test_only_the_newest_checkpoints_are_kept(model_folder, tmp_path):
    trainer(model_folder, tmp_path, **{"trainer.save_freq": 1, "trainer.max_ckpt_to_keep": 2}).fit()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("global_step_*"))
    assert kept == ["global_step_3", "global_step_4"]


def test_rows_are_aligned_at_their_first_trained_token():
    def row(ids, mask, padding):
        ones = torch.ones(len(ids), dtype=torch.long)
        blank = torch.zeros(padding, dtype=torch.long)
        return {
            "input_ids": torch.cat([torch.tensor(ids), blank]),
            "attention_mask": torch.cat([ones, blank]),
            "position_ids": torch.cat([torch.arange(len(ids)), blank]),
            "loss_mask": torch.cat([torch.tensor(mask), blank]),
        }

    batch = lay_out([row([5, 6, 7, 8], [0, 0, 1, 1], 2), row([9, 3, 4], [1, 1, 0], 3)])
    # contexts of 2 and 1 tokens: the first token of a row is never predicted
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [0, 9, 3, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 0, 1, 2]]
    assert batch["responses"].tolist() == [[7, 8], [3, 4]]
    assert batch["response_mask"].tolist() == [[1, 1], [1, 0]]


def test_a_dataset_of_ones_own_masks_the_tokens_themselves(model_folder, tmp_path):
    module = tmp_path / "mine.py"
    module.write_text(
        "import torch\n"
        "class Mine(torch.utils.data.Dataset):\n"
        "    def __init__(self, files, tokenizer, config, max_samples=-1): pass\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index):\n"
        "        ids = torch.tensor([4, 5, 6])\n"
        "        one = torch.ones(3, dtype=torch.long)\n"
        "        return {'input_ids': ids, 'attention_mask': one,\n"
        "                'position_ids': torch.arange(3), 'loss_mask': torch.tensor([0, 0, 1])}\n"
    )
    changes = {"data.custom_cls.path": str(module), "data.custom_cls.name": "Mine"}
    sft = trainer(model_folder, tmp_path, **changes)
    batch = load_rows(sft.train_dataset, [0])
    assert batch["responses"][batch["response_mask"].bool()].tolist() == [6]
    assert sft.train_step(1)["train/loss"] > 0


def test_a_batch_larger_than_the_dataset_is_refused(model_folder, tmp_path):
    with pytest.raises(ValueError, match=r"train_batch_size is 100, but .* has 64 rows"):
        trainer(model_folder, tmp_path, **{"data.train_batch_size": 100})


def test_a_row_that_is_too_long_stops_the_run_before_it_starts(model_folder, tmp_path):
    with pytest.raises(NotImplementedError, match=r"rows.parquet:1 has 7 tokens.*max_length=6"):
        trainer(model_folder, tmp_path, **{"data.max_length": 6})


def test_rows_without_a_token_to_train_on_are_refused(model_folder, tmp_path):
    changes = {"data.max_length": 4, "data.truncation": "right"}
    with pytest.raises(ValueError, match="none of its 8 rows has a token to train on"):
        trainer(model_folder, tmp_path, **changes).train_step(1)


def test_steps_are_not_held_up_by_full_collections_of_garbage(model_folder, tmp_path):
    before = gc.get_threshold()
    during = [gc.get_threshold()[0] for _ in trainer(model_folder, tmp_path).steps()]
    assert during == [NEW_OBJECTS] * 4
    assert gc.get_threshold() == before
