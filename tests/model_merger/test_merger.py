"""Checkpoints of one rank or many become one model folder, and the weights are the same."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.tiny_models import tiny_config, tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from tests.utils.checkpoint.test_on_ranks import engine_of, manager_of, step
from tests.utils.two_ranks import run_on_ranks, run_on_two_ranks
from verl.config.trainer import CheckpointConfig
from verl.model_merger import FSDPModelMerger, ModelMergerConfig
from verl.model_merger.__main__ import main
from verl.models.loading import prepare
from verl.models.lora import LoraOptions, add_lora, merged_copy, save_adapter
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.checkpoint.hf_model import own_weights, save_hf_description, save_hf_model

MODELS = ["qwen2", "qwen3_moe"]  # tied weights; experts in another layout than published


def merge(local_dir, target, **options):
    options = {"operation": "merge", "local_dir": str(local_dir), **options}
    FSDPModelMerger(ModelMergerConfig(target_dir=str(target), **options)).merge_and_save()


def assert_is_bf16_of(target, weights, kind=AutoModelForCausalLM):
    model = kind.from_pretrained(target)
    assert model.dtype == torch.bfloat16
    found = dict(model.named_parameters())
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(found[name].float(), torch.as_tensor(weight).bfloat16().float()), name


def write_shard_files(model, folder, rank, mesh):
    """As other frameworks do it: each rank pickles its DTensors."""
    sharded = fully_shard(model, mesh=mesh)
    torch.save(sharded.state_dict(), f"{folder}/model_world_size_{mesh.size()}_rank_{rank}.pt")


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """Checkpoints that two ranks wrote: ours, and pickled shards."""
    root = tmp_path_factory.mktemp("ranks")
    for model in MODELS:
        for kind in ("ours", "shards"):
            (root / kind / model).mkdir(parents=True)
        built = tiny_model(model)
        save_hf_description(built, tiny_tokenizer(), root / "shards" / model / "huggingface")

    def work(rank):
        expected = {}
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        for model in MODELS:
            engine = engine_of("full", model)
            step(engine, rank, 2)
            manager = manager_of(engine, rank, 2, save=["model"], load=[])
            manager.save_checkpoint(str(root / "ours" / model))
            whole = {name: w.detach().numpy().copy() for name, w in engine.get_per_tensor_param()}
            expected["ours", model] = whole
            write_shard_files(tiny_model(model), root / "shards" / model, rank, mesh)
            weights = own_weights(tiny_model(model))
            expected["shards", model] = {name: w.numpy().copy() for name, w in weights.items()}
        return expected

    return root, run_on_two_ranks(work, root)[0]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["ours", "shards"])
def test_what_two_ranks_wrote_becomes_one_model(on_two_ranks, tmp_path, kind, model):
    root, expected = on_two_ranks
    merge(root / kind / model, tmp_path / "merged")
    assert_is_bf16_of(tmp_path / "merged", expected[kind, model])
    is_tied = "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    assert is_tied == (model == "qwen2")
    has_tokenizer = (tmp_path / "merged" / "tokenizer_config.json").exists()
    assert has_tokenizer == (kind == "shards")


@pytest.mark.slow
def test_of_copies_among_four_ranks_one_is_taken(tmp_path):
    save_hf_description(tiny_model("llama"), None, tmp_path / "huggingface")

    def work(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
        write_shard_files(tiny_model("llama"), tmp_path, rank, mesh)

    run_on_ranks(4, work, tmp_path)
    merge(tmp_path, tmp_path / "merged")
    assert_is_bf16_of(tmp_path / "merged", dict(tiny_model("llama").named_parameters()))


@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_checkpoint_of_one_rank_is_merged_too(tmp_path, model):
    engine = engine_of("one", model)
    manager_of(engine).save_checkpoint(str(tmp_path / "actor"))
    merge(tmp_path / "actor", tmp_path / "merged")
    assert_is_bf16_of(tmp_path / "merged", dict(engine.module.named_parameters()))


def test_weights_that_were_not_saved_are_taken_from_the_masters(tmp_path):
    engine = engine_of("one", "llama", torch.bfloat16)
    step(engine)
    manager_of(engine, save=["optimizer"], load=[]).save_checkpoint(str(tmp_path / "actor"))
    merge(tmp_path / "actor", tmp_path / "merged")
    assert_is_bf16_of(tmp_path / "merged", dict(engine.module.named_parameters()))


def test_a_value_model_keeps_its_head(tmp_path):
    model = AutoModelForTokenClassification.from_config(tiny_config("qwen2", num_labels=1))
    contents = CheckpointConfig(save_contents=["model"], load_contents=[])
    manager = FSDPCheckpointManager(model, None, checkpoint_config=contents)
    manager.save_checkpoint(str(tmp_path / "critic"))
    merge(tmp_path / "critic", tmp_path / "merged", is_value_model=True)
    weights = dict(model.named_parameters())
    assert_is_bf16_of(tmp_path / "merged", weights, AutoModelForTokenClassification)


# ---- adapters ------------------------------------------------------------------------------------


def adapted_model(base, targets=("q_proj", "down_proj")):
    model = AutoModelForCausalLM.from_pretrained(base)
    add_lora(prepare(model), LoraOptions(rank=2, alpha=4, target_modules=list(targets)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    return model


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [
        ("llama", ["q_proj", "down_proj"]),
        ("mixtral", ["experts"]),
        ("qwen3_moe", ["q_proj", "experts"]),
        ("deepseek_v3", ["experts"]),
        ("gpt_oss", ["experts"]),
    ],
)
def test_an_adapter_is_merged_into_the_base_that_it_names(model_type, targets, tmp_path):
    save_hf_model(tiny_model(model_type), None, tmp_path / "base")
    model = adapted_model(tmp_path / "base", targets)
    save_adapter(model, tmp_path / "actor" / "lora_adapter")
    save_hf_description(model, None, tmp_path / "actor" / "huggingface")
    merge(tmp_path / "actor", tmp_path / "merged")
    assert_is_bf16_of(tmp_path / "merged", dict(merged_copy(model).named_parameters()))


def test_shards_with_an_adapter_become_a_base_and_an_adapter(tmp_path):
    save_hf_model(tiny_model("llama"), None, tmp_path / "base")
    model = adapted_model(tmp_path / "base")
    actor = tmp_path / "actor"
    save_hf_description(model, None, actor / "huggingface")
    names = {f"base_model.model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save(names, actor / "model_world_size_1_rank_0.pt")
    with pytest.raises(ValueError, match="lora_alpha"):
        merge(actor, tmp_path / "refused")
    save_adapter(model, actor / "lora_adapter")
    merge(actor, tmp_path / "merged")
    assert_is_bf16_of(tmp_path / "merged", dict(tiny_model("llama").named_parameters()))
    found = load_file(tmp_path / "merged" / "lora_adapter" / "adapter_model.safetensors")
    saved = load_file(actor / "lora_adapter" / "adapter_model.safetensors")
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def actor(tmp_path):
    save_hf_model(tiny_model("llama"), None, tmp_path / "actor" / "huggingface")
    return tmp_path / "actor"


def test_comparing_says_which_tensors_differ(actor, tmp_path, capsys):
    reference = tmp_path / "reference"
    command = ["test", "--backend", "fsdp", "--local_dir", str(actor), "--test_hf_dir"]
    save_hf_model(tiny_model("llama").bfloat16(), None, reference)
    assert main([*command, str(reference)]) == 0
    assert "all tensors are equal" in capsys.readouterr().out
    weights = load_file(reference / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    weights["extra"] = weights.pop("lm_head.weight")
    save_file(weights, reference / "model.safetensors")
    assert main([*command, str(reference)]) == 1
    shown = capsys.readouterr()
    assert "model.norm.weight: differs by up to 1" in shown.out
    assert "lm_head.weight: is not in the reference" in shown.out
    assert "extra: is missing" in shown.out
    assert "comparing" in shown.err  # the progress bar


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (["--local_dir", "/nowhere"], "is not a folder"),
        (["--test_hf_dir", "/nowhere"], "holds no safetensors"),
    ],
)
def test_a_mistake_is_an_exit_code_and_a_sentence(actor, capsys, change, problem):
    command = ["test", "--backend", "fsdp", "--local_dir", str(actor), "--test_hf_dir", str(actor)]
    assert main([*command, *change]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("step", ["", "global_step_10"])
def test_the_folder_of_a_run_is_answered_with_that_of_its_newest_step(step, tmp_path, capsys):
    for name in ("global_step_2", "global_step_10"):
        (tmp_path / name / "actor").mkdir(parents=True)
    folder, newest = tmp_path / step, tmp_path / "global_step_10" / "actor"
    assert main(["merge", "--backend", "fsdp", "--local_dir", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"local_dir is {folder}, " in said
    assert said.endswith(f"such as {newest}\n")


def test_a_target_that_holds_weights_is_left_as_it_is(actor, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("mine")
    (target / "model.safetensors").write_text("mine")
    with pytest.raises(ValueError, match="holds weights already; name a new folder"):
        merge(actor, target)
    assert {file.read_text() for file in target.iterdir()} == {"mine"}


def test_checkpoints_of_megatron_are_the_same_files(actor, tmp_path, capsys):
    target = tmp_path / "merged"
    options = ["--backend", "megatron", "--local_dir", str(actor)]
    assert main(["merge", *options, "--target_dir", str(target)]) == 0
    assert main(["test", *options, "--test_hf_dir", str(target)]) == 0
    (actor / "dist_ckpt").mkdir()
    assert main(["merge", *options, "--target_dir", str(tmp_path / "other")]) == 2
    assert "has no .metadata" in capsys.readouterr().err


@pytest.mark.slow
def test_the_module_is_a_command(actor, tmp_path):
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    options = ["--local_dir", str(actor), "--target_dir", str(tmp_path / "merged")]
    done = subprocess.run([*command, *options], timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert_is_bf16_of(tmp_path / "merged", dict(tiny_model("llama").named_parameters()))


def test_a_folder_without_weights_is_refused_with_what_was_looked_for(tmp_path):
    save_hf_description(tiny_model("llama"), None, tmp_path / "huggingface")
    with pytest.raises(ValueError, match=r"model_world_size_\*_rank_\*\.pt"):
        merge(tmp_path, tmp_path / "merged")
    (tmp_path / "model_world_size_2_rank_0.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="lacks model_world_size_2_rank_1"):
        merge(tmp_path, tmp_path / "merged")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        merge(tmp_path, tmp_path / "merged", hf_model_config_path="/nowhere")
