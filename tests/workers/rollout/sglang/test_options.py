"""From our configuration to the server's command line and back."""

import json
import subprocess
import sys

import pytest

from tests.workers.rollout.sglang.engines import ADAPTER, BUILD, rollout_config, save_model
from verl.config.model import MtpConfig
from verl.workers.rollout.engine_options import sglang_options
from verl.workers.rollout.factory import engine_spec
from verl.workers.rollout.sglang_rollout.arguments import (
    command_line,
    refuse_what_the_server_did_not_take,
    server_arguments,
    unknown_arguments,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def test_options_of_ours_become_arguments_of_the_server(folder):
    rollout = rollout_config(
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.7,
        tensor_model_parallel_size=4,
        dtype="bfloat16",
        enforce_eager=False,
        cudagraph_capture_sizes=[1, 8],
    )
    arguments = sglang_options(rollout, folder, device="cuda", seed=9)["arguments"]
    expected = {
        "model_path": folder,
        "random_seed": 9,
        "load_format": "dummy",
        "context_length": 72 + 56 + 8,
        "max_running_requests": 32,
        "max_prefill_tokens": 4096,
        "chunked_prefill_size": 4096,
        "disable_radix_cache": True,
        "disable_cuda_graph": False,
        "cuda_graph_bs_decode": [1, 8],
        "tp_size": 4,
        "dtype": "bfloat16",
        "mem_fraction_static": 0.7,
        "enable_memory_saver": True,
    }
    assert {name: arguments[name] for name in expected} == expected


def test_options_survive_the_way_to_another_process(folder):
    options = sglang_options(rollout_config(), folder, device="cpu", adapter=ADAPTER)
    assert json.loads(json.dumps(options)) == options
    assert options["vocabulary"] == 96
    assert options["end_tokens"] == [2]
    assert options["server"]["timeout"] == 20.0


def test_the_factory_finds_this_engine_by_its_name(folder):
    spec = engine_spec(rollout_config(), folder, device="cpu", has_weights=False)
    assert spec.build == BUILD
    assert spec.options == sglang_options(rollout_config(), folder, device="cpu")
    assert spec.start_seconds == 300.0


def test_base_weights_come_from_disk_where_only_an_adapter_is_sent(folder):
    with_adapter = sglang_options(rollout_config(), folder, device="cuda", adapter=ADAPTER)
    arguments = with_adapter["arguments"]
    assert (arguments["load_format"], arguments["max_lora_rank"]) == ("auto", 2)
    assert arguments["lora_target_modules"] == ["q_proj", "v_proj"]


def test_a_model_is_stretched_only_by_positions_that_are_never_filled(folder, tmp_path):
    variable = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"  # the model has 256 positions

    def stretches(response_length: int) -> bool:
        rollout = rollout_config(prompt_length=56, response_length=response_length)
        return variable in sglang_options(rollout, folder, device="cuda")["environment"]

    assert [stretches(n) for n in (192, 193, 200, 201)] == [False, True, True, False]


def test_fp8_is_a_way_to_store_weights_and_bf16_to_compute(folder):
    arguments = sglang_options(rollout_config(dtype="fp8"), folder, device="cuda")["arguments"]
    assert (arguments["dtype"], arguments["quantization"]) == ("bfloat16", "fp8")


@pytest.mark.parametrize(
    ("key", "change"),
    [
        (r"mtp\.enable_rollout", {"mtp": MtpConfig(enable_rollout=True)}),
        ("enable_rollout_routing_replay", {"enable_rollout_routing_replay": True}),
        ("quantization_config_file", {"quantization_config_file": "q.json"}),
    ],
)
def test_what_would_silently_not_happen_is_refused(folder, key, change):
    with pytest.raises(ValueError, match=rf"rollout\.{key} has no effect with .*sglang"):
        sglang_options(rollout_config(**change), folder, device="cuda")


def test_more_than_one_copy_of_the_model_in_an_engine_is_refused(folder):
    with pytest.raises(ValueError, match="data_parallel_size is 2"):
        sglang_options(rollout_config(data_parallel_size=2), folder, device="cuda")


def test_arguments_become_words():
    words = command_line(
        {
            "tp_size": 2,
            "disable_radix_cache": True,
            "enable_metrics": False,
            "quantization": None,
            "cuda_graph_bs_decode": [1, 8],
            "json_model_override_args": {"rope_theta": 2.5},
        }
    )
    assert words == [
        *("--tp-size", "2"),
        "--disable-radix-cache",
        *("--cuda-graph-bs-decode", "1", "8"),
        *("--json-model-override-args", '{"rope_theta": 2.5}'),
    ]


def test_what_the_user_says_wins_over_what_we_derive():
    arguments = server_arguments({"stream_interval": 8, "dtype": "bfloat16"}, {"dtype": "half"})
    assert (arguments["dtype"], arguments["stream_interval"]) == ("half", 8)
    assert arguments["skip_tokenizer_init"] is True


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("host", "always '127.0.0.1'"),
        ("api_key", "it is chosen"),
        ("tp_size", r"follows rollout\.tensor_model_parallel_size"),
    ],
)
def test_what_the_protocol_rests_on_cannot_be_set(name, reason):
    with pytest.raises(
        ValueError, match=rf"engine_kwargs\.sglang\.{name} cannot be set: .*{reason}"
    ):
        server_arguments({}, {name: "x"})


def test_what_the_server_did_not_take_is_refused():
    in_effect = {"enable_metrics": True, "mem_fraction_static": 0.5}
    refuse_what_the_server_did_not_take({"mem_fraction_static": 0.4}, in_effect)
    with pytest.raises(ValueError, match="did you mean 'mem_fraction_static'"):
        refuse_what_the_server_did_not_take({"mem_fraction": 0.4}, in_effect)
    with pytest.raises(ValueError, match="cannot switch it off"):
        refuse_what_the_server_did_not_take({"enable_metrics": False}, in_effect)


def test_the_words_of_the_servers_parser_become_names_of_options():
    said = "usage: sglang serve [-h]\nsglang serve: error: unrecognized arguments: --fast-mode 3"
    assert unknown_arguments(said) == (
        "rollout.engine_kwargs.sglang.fast_mode is no argument of this SGLang's server"
    )
    assert unknown_arguments("Traceback ...") is None


def test_the_engine_imports_nothing_that_only_the_trainer_has():
    program = (
        "import sys\n"
        "for name in ('transformers', 'tensordict', 'omegaconf', 'hydra', 'ray'):\n"
        "    sys.modules[name] = None\n"
        "import verl.workers.rollout.sglang_rollout.hosted\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
