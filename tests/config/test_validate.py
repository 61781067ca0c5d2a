"""Every contradiction is found before anything is loaded, and all of them at once."""

import pickle
import sys
from pathlib import Path

import pytest

from verl.config import validate_machine
from verl.config.faults import ConfigError, Fault, nearest_divisors, nearest_multiples, nearest_path
from verl.config.load import load_config
from verl.config.ppo import PPOConfig, PPOMegatronConfig
from verl.config.rm import RMConfig
from verl.config.roles import ESTIMATORS, POLICY_LOSSES, ROLLOUTS
from verl.config.schema import nested
from verl.config.sft import SFTConfig, SFTEngineConfig
from verl.config.validate import advice, relation_faults, validate, without_followers
from verl.utils.config import update_dict_with_config, validate_config
from verl.utils.environment import temp_env_var

A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"
C = "algorithm.rollout_correction"


def load(values, root=PPOConfig):
    by_path = {tuple(key.split(".")): value for key, value in values.items()}
    return load_config(nested(by_path), root, overrides=[f"{key}=" for key in values])


def faults_of(values, root=PPOConfig, **options):
    loaded = load(values, root)
    return validate(loaded.config, loaded.user_set, known_faults=loaded.faults, **options)


def relations(values, root=PPOConfig):
    """Contradictions alone, also of configurations that ask for what does not exist yet."""
    loaded = load(values, root)
    return [fault.text for fault in relation_faults(loaded.config, loaded.user_set)]


def mistakes(values, root=PPOConfig, **options):
    faults = faults_of(values, root, **options)
    return [fault.text for fault in faults if not fault.is_about_machine]


def test_the_defaults_are_consistent():
    assert mistakes({}) == []
    assert relations({}, PPOMegatronConfig) == []
    assert mistakes({}, SFTConfig) == []
    assert mistakes({}, SFTEngineConfig) == []


# what is set, how the message begins, what it offers
CASES = [
    (
        {"algorithm.use_pf_ppo": True, "algorithm.adv_estimator": "grpo"},
        'algorithm.use_pf_ppo is True, but algorithm.adv_estimator is "grpo"',
        "only gae draws",
    ),
    (
        {f"{R}.agent.default_agent_loop": "single_turn"},
        f'{R}.agent.default_agent_loop is "single_turn"',
        "did you mean 'single_turn_agent'",
    ),
    (
        {"reward_manager.name": "model"},
        "reward_manager.name is model, but reward_model.enable is False",
        "set reward_model.enable=True",
    ),
    (
        {f"{R}.quantization": "fp8", f"{R}.exact": True},
        f"{R}.exact is True, quantization is fp8",
        "set exact=False",
    ),
    (
        {f"{R}.quantization": "fp8", f"{R}.name": "hf"},
        f"{R}.quantization is fp8, and rollout.name is hf",
        "set rollout.name=native",
    ),
    (
        {f"{A}.router_replay.mode": "R2", f"{R}.exact": True},
        f"{A}.router_replay.mode is R2, and {R}.exact is True",
        "mode=R3",
    ),
    (
        {f"{A}.router_replay.mode": "R3"},
        f"{A}.router_replay.mode is R3, which replays what the engine returns",
        "enable_rollout_routing_replay=True",
    ),
    (
        {
            f"{A}.router_replay.mode": "R3",
            f"{R}.enable_rollout_routing_replay": True,
            f"{R}.name": "sglang",
        },
        f"{A}.router_replay.mode is R3, but rollout.name is sglang",
        "R2 replays the routes of the old policy",
    ),
    *(
        (
            {
                f"{A}.router_replay.mode": "R3",
                f"{R}.enable_rollout_routing_replay": True,
                f"{R}.name": "vllm",
                f"{R}.{key}": value,
            },
            f"{A}.router_replay.mode is R3, and {R}.{key} is {value}",
            f"set it to {needed}, or mode=R2",
        )
        for key, value, needed in (
            ("enable_prefix_caching", False, True),
            ("pipeline_model_parallel_size", 2, 1),
        )
    ),
    (
        {f"{R}.exact": True, f"{R}.name": "vllm"},
        f'{R}.exact is True, but rollout.name is "vllm"',
        "rollout.name=native or rollout.exact=False",
    ),
    (
        {f"{R}.name": "native_process", f"{R}.tensor_model_parallel_size": 2},
        f'{R}.tensor_model_parallel_size is 2, but {R}.name is "native_process"',
        "only native divides its model",
    ),
    ({f"{R}.name": "trtllm"}, f'{R}.name is "trtllm"; there is no adapter', "use native, vllm"),
    (
        {f"{A}.ppo_mini_batch_size": 250},
        f"{A}.ppo_mini_batch_size (250) must divide",
        "128 and 256",
    ),
    (
        {
            "data.train_batch_size": 1020,
            f"{A}.ppo_mini_batch_size": 1020,
            f"{A}.ulysses_sequence_parallel_size": 2,
            "algorithm.adv_estimator": "grpo",
        },
        "data.train_batch_size (1020) times",
        "1016 and 1024",
    ),
    (
        {"data.train_batch_size": 4, f"{A}.ppo_mini_batch_size": 2, f"{R}.n": 2},
        f"{A}.ppo_mini_batch_size (2) times {R}.n (2) is 4 sequences",
        "nearest would be 4",
    ),
    (
        {f"{A}.ppo_micro_batch_size": 64, f"{A}.ppo_micro_batch_size_per_gpu": 4},
        f"{A}.ppo_micro_batch_size is 64 and",
        "You have set both; they say the same in two ways, so remove ppo_micro_batch_size",
    ),
    (
        {
            f"{A}.ppo_micro_batch_size_per_gpu": None,
            f"{R}.log_prob_micro_batch_size_per_gpu": 1,
            "critic.ppo_micro_batch_size_per_gpu": 1,
        },
        f"{A}.ppo_micro_batch_size_per_gpu is null",
        "use_dynamic_bsz=True",
    ),
    (
        {
            f"{A}.use_dynamic_bsz": True,
            f"{A}.ppo_max_token_len_per_gpu": 1000,
            f"{R}.log_prob_max_token_len_per_gpu": 4096,
        },
        f"{A}.ppo_max_token_len_per_gpu is 1000; the longest sequence has 1024 tokens",
        "at least 1024",
    ),
    (
        {
            f"{A}.use_dynamic_bsz": True,
            f"{A}.ppo_max_token_len_per_gpu": 511,
            f"{R}.log_prob_max_token_len_per_gpu": 4096,
            f"{A}.ulysses_sequence_parallel_size": 2,
        },
        f"{A}.ppo_max_token_len_per_gpu is 511",
        "at least 512",
    ),
    (
        {f"{A}.ulysses_sequence_parallel_size": 3},
        f"{A}.ulysses_sequence_parallel_size is 3; that must divide the 8 ranks",
        "2 and 4",
    ),
    (
        {
            f"{A}.ulysses_sequence_parallel_size": 2,
            "actor_rollout_ref.model.use_remove_padding": False,
        },
        f"{A}.ulysses_sequence_parallel_size is 2; sequence parallelism works on packed",
        "actor_rollout_ref.model.use_remove_padding=True",
    ),
    ({f"{R}.tensor_model_parallel_size": 3}, f"{R}.tensor_model_parallel_size (3)", "2 and 4"),
    ({f"{R}.expert_parallel_size": 3}, f"{R}.expert_parallel_size is 3", "must be 1 or"),
    ({f"{R}.max_model_len": 100}, f"{R}.max_model_len is 100", "1024 tokens"),
    ({f"{R}.n": 4, f"{R}.temperature": 0}, f"{R}.temperature is 0.0; all 4 responses", "n=1"),
    ({f"{R}.val_kwargs.do_sample": True}, f"{R}.val_kwargs.temperature is 0", "above 0"),
    (
        {
            f"{R}.name": "vllm",
            f"{R}.enable_chunked_prefill": False,
            f"{R}.max_num_batched_tokens": 512,
        },
        f"{R}.max_num_batched_tokens is 512",
        "1024 tokens",
    ),
    (
        {"algorithm.adv_estimator": "gpro"},
        'algorithm.adv_estimator is "gpro"',
        "did you mean 'grpo'",
    ),
    ({f"{A}.policy_loss.loss_mode": "gsop"}, f'{A}.policy_loss.loss_mode is "gsop"', "'gspo'"),
    ({f"{A}.strategy": "fdsp"}, f'{A}.strategy is "fdsp"', "did you mean 'fsdp'"),
    ({"trainer.logger": ["consle"]}, 'trainer.logger has "consle"', "did you mean 'console'"),
    ({f"{A}.loss_agg_mode": "token_mean"}, f"{A}.loss_agg_mode is 'token_mean'", "token-mean"),
    ({"algorithm.kl_penalty": "k4"}, "algorithm.kl_penalty is 'k4'", "k3"),
    ({"critic.enable": False}, "critic.enable is False, but", "algorithm.adv_estimator=grpo"),
    ({"algorithm.adv_estimator": "grpo_passk"}, f"{R}.n is 1", "at least 2"),
    (
        {"algorithm.adv_estimator": "optimal_token_baseline"},
        f"{A}.calculate_sum_pi_squared is False",
        "set it to True",
    ),
    ({"algorithm.filter_groups.enable": True}, "algorithm.filter_groups.metric is null", "acc"),
    (
        {f"{C}.rollout_is": "token", f"{R}.name": "vllm"},
        f"{R}.calculate_log_probs is False",
        "set it to True",
    ),
    (
        {f"{C}.rollout_rs": "token_k1,seq_k9", f"{C}.rollout_rs_threshold": 2},
        f'{C}.rollout_rs has "seq_k9"',
        "criteria are",
    ),
    (
        {f"{C}.rollout_rs": "token_k1,seq_sum_k1,seq_mean_k3", f"{C}.rollout_rs_threshold": "1,2"},
        f'{C}.rollout_rs_threshold is "1,2"',
        "each of the 3 criteria",
    ),
    ({"data.custom_cls.path": "pkg://a"}, "data.custom_cls.name is null", "the class in pkg://a"),
    (
        {"reward_manager.source": "importlib"},
        "reward_manager.module.path is null",
        "needs the file",
    ),
    ({"trainer.controller": "local", "trainer.nnodes": 2}, 'trainer.controller is "local"', "ray"),
    (
        {"trainer.resume_mode": "resume_path"},
        "trainer.resume_from_path is None",
        "global_step_N",
    ),
    (
        {"actor_rollout_ref.hybrid_engine": False},
        "actor_rollout_ref.hybrid_engine is False, so generation needs ranks of its own",
        "resource_pool.rollout.devices for some of its 8",
    ),
    (
        {
            "actor_rollout_ref.hybrid_engine": False,
            "resource_pool.actor_rollout_ref.devices": [0],
            "resource_pool.rollout.devices": [1],
            f"{R}.nnodes": 1,
        },
        f"{R}.nnodes is 1 and resource_pool.rollout.devices is [1]",
        "leave one of them out",
    ),
    (
        {"actor_rollout_ref.hybrid_engine": False, "resource_pool.rollout.devices": [1]},
        "resource_pool.rollout.devices is [1], and the actor has no list",
        "set resource_pool.actor_rollout_ref.devices",
    ),
    (
        {"resource_pool.rollout.devices": [1]},
        "resource_pool.rollout.devices is [1]; with actor_rollout_ref.hybrid_engine=True",
        "hybrid_engine=False",
    ),
    (
        {
            "actor_rollout_ref.hybrid_engine": False,
            f"{R}.nnodes": 1,
            f"{R}.n_gpus_per_node": 3,
            f"{R}.tensor_model_parallel_size": 2,
        },
        f"{R}.tensor_model_parallel_size (2) times",
        "must divide the 3 ranks",
    ),
    (
        {"reward_model.enable": True, "reward_model.enable_resource_pool": True},
        "reward_model.nnodes (0) times",
        "enable_resource_pool=False",
    ),
    (
        {
            "resource_pool.actor_rollout_ref.devices": [0, 1, 2, 3],
            "resource_pool.critic.devices": [3, 4],
        },
        "resource_pool.critic.devices is [3, 4]; some of these belong",
        "devices of its own",
    ),
    (
        {"resource_pool.critic.devices": [7, 8]},
        "resource_pool.critic.devices is [7, 8]; the run has devices 0 to 7",
        "there is no 8",
    ),
    (
        {"resource_pool.critc.devices": [0]},
        'resource_pool has the role "critc"',
        "did you mean 'critic'",
    ),
    ({f"{R}.name": "vlm"}, f'{R}.name is "vlm"', "did you mean 'vllm'"),
    ({"critic.strategy": "megatron"}, 'critic.strategy is "megatron"', "either both"),
    (
        {f"{A}.strategy": "megatron", f"{A}.megatron.tensor_model_parallel_size": 3},
        f"{A}.megatron (tensor x pipeline x context) spreads a model over 3",
        "2 and 4",
    ),
    (
        {
            f"{A}.strategy": "megatron",
            "data.train_batch_size": 64,
            f"{A}.ppo_mini_batch_size": 32,
            f"{A}.ppo_micro_batch_size_per_gpu": 3,
        },
        "data.train_batch_size (64) times",
        "times their micro-batch of 3",
    ),
    ({"resource_pool.critic.gpus": 2}, "resource_pool.critic must have a list", "devices=[0,1]"),
    ({"trainer.save_freq": -2}, "trainer.save_freq is -2", "at least -1"),
    ({"actor_rollout_ref.model.lora_rank": -1}, "actor_rollout_ref.model.lora_rank is -1", "0"),
]


@pytest.mark.parametrize(("values", "begins", "offers"), CASES, ids=[case[1] for case in CASES])
def test_a_contradiction_is_named_with_its_way_out(values, begins, offers):
    messages = mistakes(values)
    assert len(messages) == 1, messages
    assert messages[0].startswith(begins)
    assert offers in messages[0]


def test_all_faults_are_reported_together():
    messages = mistakes(
        {
            "algorithm.adv_estimator": "gpro",
            f"{A}.ppo_mini_batch_size": 250,
            f"{R}.tensor_model_parallel_size": 3,
            f"{A}.optim.lr": "abc",
        }
    )
    assert len(messages) == 4


def test_a_key_at_fault_is_not_reported_again_for_its_relations():
    messages = mistakes({f"{A}.ppo_mini_batch_size": "abc", "data.train_batch_size": 64})
    assert len(messages) == 1
    assert messages[0].startswith(f'{A}.ppo_mini_batch_size is "abc"')


def test_a_mistake_is_not_repeated_for_the_keys_that_follow_it():
    messages = mistakes({f"{A}.loss_agg_mode": "token_mean"})  # critic.loss_agg_mode follows
    assert len(messages) == 1
    messages = mistakes({"critic.loss_agg_mode": "token_mean"})
    assert messages[0].startswith("critic.loss_agg_mode is 'token_mean'")


@pytest.mark.parametrize(
    ("user_set", "named"),
    [((), "a"), (("a",), "a"), (("b",), "b"), (("c",), "c"), (("b", "c"), "b"), (("a", "c"), "a")],
)
def test_of_equal_mistakes_the_first_that_the_user_wrote_is_named(user_set, named):
    faults = [Fault(f"{key} is 0; it must be 1", (key,)) for key in "abc"]
    (kept,) = without_followers([*faults], frozenset(user_set))
    assert kept.keys == (named,)


@pytest.mark.parametrize(
    "values",
    [
        {"trainer.n_gpus_per_node": 0},
        {"trainer.nnodes": 0, f"{A}.ppo_micro_batch_size": 8},
        {f"{A}.ppo_mini_batch_size": 0},
        {f"{A}.ulysses_sequence_parallel_size": 0},
        {f"{R}.tensor_model_parallel_size": 0},
        {f"{R}.n": 0},
        {"resource_pool.critic.devices": []},
        {"resource_pool.critic.devices": 3},
        {"resource_pool.critic": 3},
    ],
)
def test_a_number_that_nothing_can_be_divided_by_is_one_fault(values):
    assert len(mistakes(values)) == 1


def test_sizes_of_roles_that_do_not_run_are_not_checked():
    values = {"algorithm.adv_estimator": "grpo", "critic.ppo_micro_batch_size_per_gpu": None}
    assert mistakes(values) == []
    assert len(mistakes({"critic.ppo_micro_batch_size_per_gpu": None})) == 1


def test_a_default_size_per_gpu_gives_way_silently():
    assert mistakes({f"{A}.ppo_micro_batch_size": 64}) == []


def test_names_of_the_users_own_are_allowed_where_they_may_have_been_registered():
    mine = {"algorithm.adv_estimator": "mine", f"{A}.policy_loss.loss_mode": "mine"}
    assert len(mistakes(mine)) == 2
    assert mistakes(mine, names_are_open=True) == []
    assert mistakes({**mine, "actor_rollout_ref.model.external_lib": "my_module"}) == []
    with temp_env_var("VERL_USE_EXTERNAL_MODULES", "my_module"):
        assert mistakes(mine) == []


def test_the_listed_names_are_the_registered_ones():
    registry = pytest.importorskip("verl.algos.registry")
    pytest.importorskip("verl.algos.advantages")
    pytest.importorskip("verl.algos.policy_losses")
    assert set(ESTIMATORS) <= set(registry.ADV_ESTIMATOR_REGISTRY)
    assert set(POLICY_LOSSES) <= set(registry.POLICY_LOSS_REGISTRY)


def machine_texts(values, root=PPOConfig):
    return [fault.text for fault in faults_of(values, root) if fault.is_about_machine]


def test_files_without_tools_are_named_before_the_run(tmp_path):
    turns = f"{R}.multi_turn"
    files = {
        "tool_config_path": ("tools: []", "which lists nothing below `tools:`"),
        "interaction_config_path": ("interaction: [", "is no YAML"),
        "function_tool_path": ("def f(): pass", "which has no tools; decorate functions with"),
    }
    values = {f"{turns}.enable": True}
    for key, (content, _) in files.items():
        (tmp_path / key).write_text(content)
        values[f"{turns}.{key}"] = str(tmp_path / key)
    texts = [fault.text for fault in faults_of(values)]
    for key, (_, message) in files.items():
        (text,) = [one for one in texts if one.startswith(f"{turns}.{key}")]
        assert message in text
    absent = {f"{turns}.tool_config_path": str(tmp_path / "absent.yaml")}
    texts = [text for text in machine_texts(absent) if "tool_config_path" in text]
    assert len(texts) == 1  # data.tool_config_path follows


def test_missing_files_are_named_with_the_closest_existing_one(tmp_path):
    (tmp_path / "train.parquet").touch()
    (tmp_path / "model").mkdir()
    files = {
        "data.train_files": [str(tmp_path / "train.parquet"), str(tmp_path / "trian.parquet")],
        "data.val_files": "hdfs://far/away.parquet",
        "actor_rollout_ref.model.path": str(tmp_path / "modle"),
    }
    assert machine_texts(files) == [
        f'data.train_files is "{tmp_path}/trian.parquet", which does not exist; '
        f"the closest existing path is {tmp_path}/train.parquet",
        f'actor_rollout_ref.model.path is "{tmp_path}/modle", which does not exist; '
        f"the closest existing path is {tmp_path}/model",
    ]


REFERENCES = {
    "actor_rollout_ref.ref.model.path": {f"{A}.use_kl_loss": True},
    "actor_rollout_ref.model.lora_adapter_path": {},
    "distillation.teacher_models.teacher_model.model_path": {"distillation.enabled": True},
}


@pytest.mark.parametrize("key", REFERENCES)
def test_a_missing_reference_teacher_or_adapter_is_named_before_the_run(tmp_path, key):
    values = {**REFERENCES[key], key: str(tmp_path / "nobody")}
    (text,) = [text for text in machine_texts(values) if text.startswith(f"{key} is")]
    assert f'"{tmp_path}/nobody", which does not exist; ' in text


def test_the_reference_of_an_implicit_reward_model_is_named_before_the_run(tmp_path):
    values = {"objective.name": "implicit", "objective.ref_path": str(tmp_path / "nobody")}
    texts = machine_texts(values, RMConfig)
    assert any(text.startswith("objective.ref_path is") for text in texts)


def test_a_model_on_a_hub_is_not_looked_for_here():
    texts = machine_texts({"actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B-Instruct"})
    assert not any("model.path" in text for text in texts)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_offers_the_built_in_one(engine):
    if validate_machine.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed")
    texts = [text for text in machine_texts({f"{R}.name": engine}) if text.startswith(f"{R}.name")]
    assert len(texts) == 1
    assert f"{R}.name=native" in texts[0]
    other = {f"{R}.name": engine, f"{R}.python": sys.executable}
    texts = [text for text in machine_texts(other) if text.startswith(f"{R}.name")]
    states_versions = bool(ROLLOUTS[engine].versions)
    assert [f"has no {engine}; supported is" in text for text in texts] == [True] * states_versions


def test_trackers_that_are_not_installed_are_named():
    if validate_machine.find_spec("swanlab") is not None:
        pytest.skip("swanlab is installed")
    texts = machine_texts({"trainer.logger": ["console", "swanlab"]}, SFTConfig)
    assert any(text.startswith('trainer.logger has "swanlab"') for text in texts)


def test_sft_batches_must_fall_evenly_on_the_ranks():
    messages = mistakes({"data.train_batch_size": 250}, SFTConfig)
    assert messages == [
        "data.train_batch_size is 250; it must be a multiple of the 8 ranks: 248 and 256"
    ]
    messages = mistakes({"data.max_token_len_per_gpu": 100}, SFTEngineConfig)
    assert len(messages) == 1


def test_the_public_check_raises_one_error_with_everything():
    config = {"data": {"train_batch_size": 1020}, "critic": {"ppo_micro_batch_size_per_gpu": None}}
    with pytest.raises(ValueError, match="3 faults"):
        validate_config(config, use_reference_policy=False, use_critic=True)
    config = {"critic": {"ppo_micro_batch_size_per_gpu": None}, "mine": 1}
    validate_config(config, use_reference_policy=False, use_critic=False)


def test_a_dictionary_takes_over_the_values_that_the_configuration_has():
    wanted = {"lr": 1, "other": 2}
    update_dict_with_config(wanted, {"lr": 5, "more": 6})
    assert wanted == {"lr": 5, "other": 2}


def test_nearest_numbers_lie_on_both_sides():
    assert nearest_divisors(250, of=1024) == "128 and 256"
    assert nearest_divisors(2048, of=1024) == "1024"
    assert nearest_multiples(12, of=8) == "8 and 16"
    assert nearest_multiples(3, of=8) == "8"


def test_the_nearest_path_climbs_to_what_exists(tmp_path):
    assert nearest_path(tmp_path / "a" / "b") == f"the closest existing folder is {tmp_path}"
    (tmp_path / "data").mkdir()
    missing = Path(tmp_path / "dta" / "b.parquet")
    assert nearest_path(missing) == f"the closest existing path is {tmp_path / 'data'}"


def machine(values):
    return [fault.text for fault in faults_of(values) if fault.is_about_machine]


def test_a_device_that_is_not_here_is_named_unless_the_run_is_elsewhere(monkeypatch):
    monkeypatch.setattr(validate_machine, "DEVICE_FILES", {"npu": ("/nonexistent",)})
    npu = {"trainer.device": "npu", "trainer.n_gpus_per_node": 1}
    assert any(text.startswith('trainer.device is "npu"') for text in machine(npu))
    ray = machine({**npu, "trainer.controller": "ray"})
    assert not any(text.startswith("trainer.device") for text in ray)


def test_a_profiler_of_devices_is_refused_on_a_cpu(monkeypatch):
    def is_refused(**changes):
        values = {
            "global_profiler.tool": "nsys",
            "global_profiler.steps": [1],
            f"{A}.profiler.enable": True,
            "trainer.n_gpus_per_node": 1,
        }
        texts = machine(values | {f"trainer.{name}": value for name, value in changes.items()})
        return any(text.startswith("global_profiler.tool is nsys") for text in texts)

    monkeypatch.setattr(validate_machine, "DEVICE_FILES", {"cuda": ("/nonexistent",)})
    assert is_refused(device="cpu")
    assert is_refused(device="auto")
    assert not is_refused(device="auto", controller="ray")
    monkeypatch.setattr(validate_machine, "DEVICE_FILES", {"cuda": ("/dev/null",)})
    assert is_refused(device="cpu")
    assert not is_refused(device="auto")
    assert not is_refused(device="cuda")
    assert not [one for one in machine({"trainer.device": "cpu"}) if "global_profiler" in one]


def test_the_package_of_a_trace_back_end_must_be_here(monkeypatch):
    monkeypatch.setattr(validate_machine, "find_spec", lambda name: None)
    assert any("trace.backend is" in text for text in machine({f"{R}.trace.backend": "weave"}))


def test_a_model_must_be_chosen():
    assert any("actor_rollout_ref.model.path is required" in text for text in machine({}))


BROKEN = {
    "cut": (b'{"model_type": ', "is no JSON"),
    "list": (b"[1]", r"holds [1]; it must hold a JSON object"),
    "bytes": (b'\xff{"a": 1}', "is no text in UTF-8"),
}


@pytest.mark.parametrize("how", [*BROKEN, "folder"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_broken_file_of_a_model_is_named_once(tmp_path, name, how):
    content, text = BROKEN.get(how, (b"", "cannot be read: Is a directory"))
    if how == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    key = "actor_rollout_ref.model"
    override = {f"{key}.override_config.hidden_size": 8}
    for values in ({}, override):
        (found,) = mistakes({f"{key}.path": str(tmp_path), **values})
        assert found.startswith(f"{key}.path: {tmp_path / name} {text}")


@pytest.mark.parametrize(
    "key", ["multi_turn.tool_config_path", "multi_turn.interaction_config_path"]
)
def test_a_broken_list_of_tools_or_users_is_named(tmp_path, key):
    file = tmp_path / "list.yaml"
    for content, text in ((b"tools: [", "is no YAML"), (b"\xff", "is no text in UTF-8")):
        file.write_bytes(content)
        (found,) = mistakes({f"{R}.{key}": str(file)})
        assert found.startswith(f"{R}.{key}: {file} {text}")
    (found,) = mistakes({f"{R}.{key}": str(tmp_path)})
    assert found.endswith("cannot be read: Is a directory")


def test_a_file_that_lists_no_agent_loops_is_named(tmp_path):
    file, key = tmp_path / "loops.yaml", f"{R}.agent.agent_loop_config_path"
    file.write_text("- name: mine\n  _target_: a.B\n")
    assert mistakes({key: str(file)}) == []
    file.write_text("name: mine\n")
    assert mistakes({key: str(file)}) == [f'{key} is "{file}", which does not list agent loops']
    file.write_text("[")
    (found,) = mistakes({key: str(file)})
    assert found.startswith(f"{key}: {file} is no YAML")


def test_an_override_of_megatron_is_refused_without_it(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    model, key = "actor_rollout_ref.model", "actor_rollout_ref.model.override_config.moe_config"
    frozen = {f"{model}.path": str(tmp_path), f"{key}.freeze_moe_router": True}
    assert mistakes(frozen) == [f"{key} is an option of strategy=megatron; leave it out"]
    assert mistakes({**frozen, "actor_rollout_ref.actor.strategy": "megatron"}) == []


def test_misspelt_and_missing_values_of_rotary_embeddings_are_named(tmp_path):
    (tmp_path / "config.json").write_text('{"rope_theta": 10000.0}')
    key = "actor_rollout_ref.model.override_config.rope_scaling"
    yarn = {"actor_rollout_ref.model.path": str(tmp_path), f"{key}.type": "yarn"}
    assert mistakes({**yarn, f"{key}.factor": 2.0}) == []
    assert mistakes({**yarn, f"{key}.type": "of_my_own"}) == []
    assert mistakes({**yarn, f"{key}.type": "yran"}) == [f"{key}.type is yran; did you mean yarn?"]
    (text,) = mistakes(yarn)
    assert "factor is missing" in text
    misspelt = mistakes({**yarn, f"{key}.factor": 2.0, f"{key}.beta_fats": 32})
    assert misspelt == [
        f"{key}.beta_fats: rotary embeddings have no such value; did you mean beta_fast?"
    ]
    (tmp_path / "config.json").write_text('{"rope_scaling": {"type": "linear", "factor": 4.0}}')
    assert mistakes(yarn) == []


def test_arguments_of_an_engine_are_looked_up_where_it_is_installed(tmp_path):
    source = tmp_path / "lib/python3.12/site-packages/vllm/engine/arg_utils.py"
    source.parent.mkdir(parents=True)
    source.write_text("class EngineArgs:\n    swap_space: int = 4\n    max_num_seqs: int = 1\n")
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.touch()
    vllm = {f"{R}.name": "vllm", f"{R}.python": str(python)}
    assert mistakes({**vllm, f"{R}.engine_kwargs.vllm.swap_space": 8}) == []
    (text,) = mistakes({**vllm, f"{R}.engine_kwargs.vllm.swap_spaces": 8})
    assert text.endswith("is no argument of the installed vllm; did you mean swap_space?")
    source.unlink()
    unchecked = {**vllm, f"{R}.engine_kwargs.vllm.swap_spaces": 8}
    assert mistakes(unchecked) == []
    said = advice(load(unchecked).config)
    assert f"{R}.engine_kwargs.vllm.swap_spaces is passed on; whether" in "".join(said)
    (text,) = mistakes({f"{R}.engine_kwargs.native.swap_space": 8})
    assert "this engine takes its settings from" in text


def test_a_rollout_in_fp8_without_correction_is_named_at_the_start():
    notices = load({f"{R}.quantization": "fp8"}).notices
    assert any("rollout_correction.rollout_is=token" in notice for notice in notices)
    corrected = load({f"{R}.quantization": "fp8", f"{C}.rollout_is": "token"})
    assert not any("rollout_is=token" in notice for notice in corrected.notices)


def test_a_refusal_travels_between_processes():
    refusal = ConfigError([Fault("one is wrong", ("a.key",)), Fault("another")])
    arrived = pickle.loads(pickle.dumps(refusal))
    assert (str(arrived), arrived.faults) == (str(refusal), refusal.faults)
