"""What makes a run another run, said in words."""

import pytest
import torch

from tests.tiny_models import tiny_model
from verl.utils.checkpoint.manifest import (
    SAMPLE_BYTES,
    compare,
    config_identity,
    dataset_identity,
    fingerprint,
    model_identity,
)

CONFIG = {
    "algorithm": {"gamma": 1.0, "adv_estimator": "grpo"},
    "trainer": {"total_epochs": 3, "save_freq": 5, "n_gpus_per_node": 1, "critic_warmup": 0},
    "actor_rollout_ref": {
        "actor": {"ppo_micro_batch_size_per_gpu": 8, "optim": {"lr": 1e-6}, "checkpoint": {"a": 1}},
    },
}


def test_the_same_run_has_no_differences():
    one, other = (fingerprint(model=model_identity(tiny_model("qwen2"))) for _ in range(2))
    assert compare(one, other) == []


def test_another_model_is_named_by_its_parameters():
    old = fingerprint(model=model_identity(torch.nn.Linear(2, 3)))
    new = fingerprint(model=model_identity(torch.nn.Linear(2, 4, bias=False).bfloat16()))
    assert compare(old, new) == [
        "model: bias was 'float32[3]' and is gone",
        "model: weight was 'float32[3, 2]' and is 'bfloat16[4, 2]'",
    ]


def test_many_differences_are_cut_short():
    old = fingerprint(model={f"w{number:02}": "float32[1]" for number in range(50)})
    differences = compare(old, fingerprint(model={}))
    assert len(differences) == 21
    assert differences[-1] == "model: and 30 more differences"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("algorithm", "gamma", 0.9),
        ("algorithm", "adv_estimator", "gae"),
        ("trainer", "critic_warmup", 2),
    ],
)
def test_an_option_that_makes_another_run_is_refused(section, key, value):
    changed = {**CONFIG, section: {**CONFIG[section], key: value}}
    (difference,) = compare(
        fingerprint(config=config_identity(CONFIG)), fingerprint(config=config_identity(changed))
    )
    assert difference == f"config: {section}.{key} was {CONFIG[section][key]!r} and is {value!r}"


def test_options_of_length_reports_memory_and_contents_may_change():
    changed = {
        **CONFIG,
        "trainer": {"total_epochs": 9, "save_freq": 1, "n_gpus_per_node": 4, "critic_warmup": 0},
        "actor_rollout_ref": {
            "actor": {
                "ppo_micro_batch_size_per_gpu": 1,
                "optim": {"lr": 1e-6},
                "checkpoint": {"a": 2},
            },
        },
    }
    old, new = (fingerprint(config=config_identity(config)) for config in (CONFIG, changed))
    assert compare(old, new) == []
    assert len(compare(old, new, may_change=())) == 5


def test_a_learning_rate_may_change_only_where_the_caller_says_so():
    changed = {**CONFIG, "actor_rollout_ref": {"actor": {"optim": {"lr": 2e-6}}}}
    old, new = (fingerprint(config=config_identity(config)) for config in (CONFIG, changed))
    assert any("optim.lr was 1e-06 and is 2e-06" in line for line in compare(old, new))
    assert not any("optim.lr" in line for line in compare(old, new, may_change=["*.optim.lr"]))


def test_an_added_or_removed_option_is_a_difference():
    old, new = fingerprint(config={"algorithm.x": 1}), fingerprint(config={"algorithm.y": 2})
    assert compare(old, new) == [
        "config: algorithm.x was 1 and is gone",
        "config: algorithm.y is new: 2",
    ]


def test_values_that_json_lacks_are_compared_by_their_text():
    identity = config_identity({"a": float("inf"), "b": (1, 2), "c": {}, "d": None, "e": object})
    assert identity == {"a": "inf", "b": [1, 2], "c": {}, "d": None, "e": "<class 'object'>"}


def test_a_dataset_is_known_by_its_files_and_rows(tmp_path):
    path = tmp_path / "train.parquet"
    path.write_bytes(b"rows" * 10)
    old = fingerprint(data=dataset_identity([path], num_rows=10))
    assert compare(old, fingerprint(data=dataset_identity([path], num_rows=10))) == []
    assert compare(old, fingerprint(data=dataset_identity([path], num_rows=9))) == [
        "data: rows was 10 and is 9"
    ]
    path.write_bytes(b"Rows" * 10)
    (difference,) = compare(old, fingerprint(data=dataset_identity([path], num_rows=10)))
    assert "file 0 was 'train.parquet, 40 bytes" in difference
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "train.parquet").write_bytes(b"rows" * 10)
    same = dataset_identity([moved / "train.parquet"], num_rows=10)
    assert compare(old, fingerprint(data=same)) == []


@pytest.mark.parametrize("place", [0, SAMPLE_BYTES - 1, -1, -SAMPLE_BYTES])
def test_a_change_at_either_end_of_a_large_file_is_seen(tmp_path, place):
    path = tmp_path / "large.parquet"
    with open(path, "wb") as file:
        file.truncate(3 * SAMPLE_BYTES)
    before = dataset_identity([path])
    with open(path, "r+b") as file:
        file.seek(place, 2 if place < 0 else 0)
        file.write(b"x")
    assert dataset_identity([path]) != before


def test_the_order_of_files_matters(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name)
    files = [tmp_path / "a", tmp_path / "b"]
    assert dataset_identity(files) != dataset_identity(files[::-1])


def test_data_that_is_not_in_files_is_known_by_its_digest():
    assert dataset_identity([], digest="abc") == {"digest": "abc"}
