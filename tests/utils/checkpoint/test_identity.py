"""What makes a run another run, said in words."""

import huggingface_hub
import pytest
import torch

from tests.tiny_models import tiny_model
from verl.utils.checkpoint.manifest import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    SAMPLE_BYTES,
    compare,
    config_identity,
    dataset_identity,
    fingerprint,
    model_identity,
    weights_identity,
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


def model_folder(folder, size=100):
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(bytes(size))
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("a model")
    return folder


@pytest.mark.parametrize("place", [0, 99, SAMPLE_BYTES + NUM_BLOCKS * BLOCK_BYTES + 5])
def test_weights_that_were_replaced_in_place_are_seen(tmp_path, place):
    size = max(100, 2 * SAMPLE_BYTES + 2 * NUM_BLOCKS * BLOCK_BYTES if place > 99 else 0)
    folder = model_folder(tmp_path / "model", size)
    config = {"actor_rollout_ref.model.path": str(folder), "critic.model.path": str(folder)}
    before = fingerprint(config=config)
    (folder / "README.md").write_text("the same model")
    assert compare(before, fingerprint(config=config)) == []
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(place)
        file.write(bytes([1]) * (2 * BLOCK_BYTES if place > 99 else 1))
    (difference,) = compare(before, fingerprint(config=config))
    assert difference.startswith("weights: actor_rollout_ref.model.path/model.safetensors was")


def test_code_that_was_edited_is_seen_wherever_an_option_names_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("reward.py", "mine.py", "extra.py"):
        (tmp_path / name).write_text("x = 1")
    (tmp_path / "loops.yaml").write_text("- name: mine\n  _target_: mine.Loop\n")
    config = {
        "custom_reward_function.path": str(tmp_path / "reward.py"),
        "data.sampler.class_path": "pkg://extra",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(tmp_path / "loops.yaml"),
        "actor_rollout_ref.model.external_lib": ["extra"],
        "data.val_files": str(tmp_path / "reward.py"),  # may change
        "trainer.device": "cpu",
    }
    before = fingerprint(config=config)
    assert compare(before, fingerprint(config=config)) == []
    for name in ("reward.py", "mine.py", "extra.py"):
        (tmp_path / name).write_text("x = 2")
    found = [line.split(" was ")[0] for line in compare(before, fingerprint(config=config))]
    assert found == [
        "code: actor_rollout_ref.model.external_lib",
        "code: actor_rollout_ref.rollout.agent.agent_loop_config_path/mine.Loop",
        "code: custom_reward_function.path",
        "code: data.sampler.class_path",
    ]
    assert compare(before, fingerprint(config=config), accepted=["code"]) == []


def test_a_model_of_the_hub_is_known_by_its_revision(tmp_path, monkeypatch):
    for number in (1, 2):
        commit = str(number) * 40
        snapshot = tmp_path / "models--we--tiny" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        refs = tmp_path / "models--we--tiny" / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(commit)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        found = weights_identity({"model.path": "we/tiny", "critic.model.path": "~/no/such/model"})
        assert found == {"model.path": f"revision {commit}"}


def test_steps_that_were_saved_without_weights_and_code_are_not_asked_for_them(tmp_path):
    config = {"model.path": str(model_folder(tmp_path / "model"))}
    old = {"config": dict(config)}
    assert compare(old, fingerprint(config=config)) == []


def test_accepted_differences_are_sections_or_keys():
    old, new = {"config": {"a.b": 1, "c": 1}}, {"config": {"a.b": 2, "c": 2}}
    assert compare(old, new, accepted=["a.*"]) == ["config: c was 1 and is 2"]
    assert compare(old, new, accepted=["config"]) == []
