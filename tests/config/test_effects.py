"""Settings that do nothing are named before a run, and what does not exist is refused."""

from verl.config.effects import OTHER_BACK_END, absent_faults, idle_notices, without_effect
from verl.config.load import load_config
from verl.config.ppo import PPOConfig, PPOMegatronConfig
from verl.config.schema import Keys, nested
from verl.config.validate import advice

A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"
GRPO = {"algorithm.adv_estimator": "grpo", f"{R}.n": 8}


def load(values):
    by_path = {tuple(key.split(".")): value for key, value in values.items()}
    return load_config(nested(by_path), PPOConfig, overrides=[f"{key}=" for key in values])


def idle(values):
    loaded = load(values)
    return dict(without_effect(loaded.checked(), loaded.user_set))


def test_settings_without_effect_are_named():
    """GRPO with the built-in engine: no critic, no reference, no LoRA, no reward model."""
    settings = {
        "critic.optim.lr": 1e-3,
        "trainer.critic_warmup": 3,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 2,
        "algorithm.kl_ctrl.kl_coef": 0.5,
        f"{A}.kl_loss_coef": 0.5,
        f"{A}.kl_loss_type": "k1",
        "algorithm.lam": 0.9,
        "algorithm.gamma": 0.9,
        "algorithm.pf_ppo.weight_pow": 3.0,
        "algorithm.filter_groups.metric": "acc",
        "algorithm.rollout_correction.loss_type": "reinforce",
        "algorithm.rollout_correction.rollout_is_threshold": 3.0,
        f"{A}.policy_loss.clip_cov_ratio": 0.1,
        f"{A}.policy_loss.ppo_kl_coef": 0.2,
        f"{A}.tau_pos": 0.2,
        f"{A}.loss_scale_factor": 100,
        f"{A}.ppo_max_token_len_per_gpu": 4096,
        f"{A}.megatron.seed": 3,
        f"{R}.val_kwargs.temperature": 0.5,
        f"{R}.engine_kwargs.vllm.swap_space": 4,
        f"{R}.multi_stage_wake_up": True,
        "actor_rollout_ref.model.lora_alpha": 64,
        "reward_model.model.path": "org/rm",
        "custom_reward_function.name": "f",
        "global_profiler.tool": "torch",
    }
    assert idle({**GRPO, **settings}).keys() == settings.keys()


def test_settings_whose_switch_is_on_are_not_named():
    """PPO with everything on, and vLLM."""
    settings = {
        "critic.optim.lr": 1e-3,
        "trainer.critic_warmup": 3,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 2,
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": 0.5,
        f"{A}.use_kl_loss": True,
        f"{A}.kl_loss_coef": 0.5,
        "algorithm.lam": 0.9,
        "algorithm.gamma": 0.9,
        "algorithm.use_pf_ppo": True,
        "algorithm.pf_ppo.weight_pow": 3.0,
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "acc",
        "algorithm.rollout_correction.bypass_mode": True,
        "algorithm.rollout_correction.loss_type": "reinforce",
        f"{A}.policy_loss.loss_mode": "clip_cov",
        f"{A}.policy_loss.clip_cov_ratio": 0.1,
        f"{A}.use_dynamic_bsz": True,
        f"{A}.ppo_max_token_len_per_gpu": 4096,
        f"{R}.val_kwargs.do_sample": True,
        f"{R}.val_kwargs.temperature": 0.5,
        f"{R}.name": "vllm",
        f"{R}.engine_kwargs.vllm.swap_space": 4,
        "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.model.lora_alpha": 64,
        "reward_model.enable": True,
        "reward_model.model.path": "org/rm",
        "custom_reward_function.path": "f.py",
        "custom_reward_function.name": "f",
        "global_profiler.steps": [1],
        "global_profiler.tool": "torch",
    }
    assert idle(settings) == {}


def test_a_stored_adapter_and_a_shared_reference_leave_settings_without_effect():
    model = "actor_rollout_ref.model"
    base = {**GRPO, f"{A}.use_kl_loss": True, f"{model}.lora_rank": 8}
    ref = {"actor_rollout_ref.ref.fsdp_config.param_offload": True}
    assert idle({**base, **ref}).keys() == ref.keys()
    assert idle({**base, **ref, "actor_rollout_ref.ref.model.path": "org/other"}) == {}
    form = {f"{model}.lora_alpha": 32, f"{model}.target_modules": ["q_proj"]}
    assert idle({**base, **form}) == {}
    assert idle({**base, **form, f"{model}.lora_adapter_path": "adapter"}).keys() == form.keys()


def test_what_only_a_gpu_does_is_named_on_a_cpu():
    settings = {f"{A}.use_torch_compile": False, f"{A}.probe_micro_batch": True}
    assert idle({**GRPO, **settings, "trainer.device": "cpu"}).keys() == settings.keys()
    assert not idle({**GRPO, **settings, "trainer.device": "cuda"})


def test_padded_rows_cannot_be_chosen():
    key = "actor_rollout_ref.model.use_remove_padding"
    assert "always packed" in idle({**GRPO, key: False})[key]
    assert idle({**GRPO, key: True, f"{A}.ulysses_sequence_parallel_size": 2}) == {}, "it is needed"


def test_the_form_of_a_critics_adapters_needs_a_rank():
    alpha = {"critic.model.lora_alpha": 32}
    assert idle(alpha).keys() == alpha.keys()
    assert idle({**alpha, "critic.model.lora_rank": 4}) == {}


def test_settings_of_the_other_back_end_are_named():
    found = idle({f"{A}.fsdp_config.param_offload": True, f"{A}.strategy": "megatron"})
    assert found == {f"{A}.fsdp_config.param_offload": OTHER_BACK_END}


def test_one_clip_ratio_is_overruled_by_two():
    both = {f"{A}.clip_ratio_low": 0.2, f"{A}.clip_ratio_high": 0.28}
    assert f"{A}.clip_ratio" in idle({f"{A}.clip_ratio": 0.1, **both})
    assert idle({f"{A}.clip_ratio": 0.1, f"{A}.clip_ratio_high": 0.28}) == {}


def test_keys_for_older_scripts_are_named():
    keys = {"trainer.ray_wait_register_center_timeout": 100, "data.return_raw_chat": False}
    keys["reward_model.launch_reward_fn_async"] = True
    assert idle(keys).keys() == keys.keys()
    assert "as soon as they end" in idle(keys)["reward_model.launch_reward_fn_async"]


def test_a_default_that_is_stated_is_not_named():
    assert idle({**GRPO, "critic.ppo_epochs": 1, "data.return_raw_chat": True}) == {}


def test_a_switch_below_an_idle_section_is_named_and_its_own_is_not():
    found = idle({**GRPO, "critic.profiler.enable": True, "critic.enable": False})
    assert found.keys() == {"critic.profiler.enable"}


def test_a_profiler_that_nothing_starts_is_named_with_its_switch():
    profiled = {"global_profiler.steps": [1], "global_profiler.tool": "torch"}
    key = "critic.profiler.enable"
    assert "actor's ranks record" in idle({**profiled, key: True})[key]
    assert idle({**profiled, f"{A}.profiler.enable": True}) == {}


def test_the_parts_of_engine_kwargs_are_for_one_engine_each():
    key = f"{R}.engine_kwargs.vllm.swap_space"
    assert idle({key: 4, f"{R}.name": "sglang"})[key] == "name is sglang, and this is for vllm"


def test_notices_are_one_line_each():
    loaded = load({**GRPO, "critic.optim.lr": 1e-3})
    assert idle_notices(loaded.config, loaded.user_set) == [
        "critic.optim.lr has no effect here: there is no critic: algorithm.adv_estimator does not "
        "use one"
    ]


def refused(values, **options):
    loaded = load(values)
    return [fault.text for fault in absent_faults(loaded.config, loaded.user_set, **options)]


def test_what_does_not_exist_is_refused_with_key_value_and_reason():
    assert refused({"transfer_queue.enable": True, f"{R}.quantization": None}) == []


def test_a_loop_of_ones_own_may_read_what_built_in_loops_do_not():
    own = {f"{R}.agent.agent_loop_config_path": "loops.yaml"}
    repeats = {f"{R}.multi_turn.num_repeat_rollouts": 3}
    assert idle({**repeats, f"{R}.multi_turn.enable": True}).keys() == repeats.keys()
    assert idle({**own, **repeats}) == {}


def test_options_of_turns_have_an_effect_where_the_default_loop_has_turns():
    turns = {f"{R}.multi_turn.max_user_turns": 3, f"{R}.multi_turn.tool_config_path": "tools.yaml"}
    assert idle(turns).keys() == turns.keys()
    assert "only rows that name another loop" in idle(turns)[f"{R}.multi_turn.max_user_turns"]
    assert idle({**turns, f"{R}.multi_turn.enable": True}) == {}
    assert idle({**turns, f"{R}.agent.default_agent_loop": "tool_agent"}) == {}
    assert refused({**turns, f"{R}.multi_turn.enable": True}) == []


def test_a_switch_itself_is_never_called_idle():
    assert idle({"critic.enable": False, **GRPO}) == {}


def test_unusual_combinations_get_a_word_of_advice():
    config = load(
        {
            "algorithm.adv_estimator": "grpo",
            "algorithm.use_kl_in_reward": True,
            f"{A}.use_kl_loss": True,
            f"{R}.val_kwargs.n": 4,
            "trainer.save_freq": 5,
        }
    ).checked()
    said = advice(config)
    assert len(said) == 3
    assert "rollout.n is 1" in said[0]
    assert "counts twice" in said[1]
    assert "all of them the same" in said[2]
    assert advice(load({**GRPO, "trainer.save_freq": 5}).checked()) == []


def test_the_megatron_schema_has_keys_that_the_fsdp_schema_lacks():
    assert f"{A}.megatron.seed" in Keys(PPOMegatronConfig())
    assert f"{A}.megatron.seed" not in Keys(PPOConfig())


def test_a_choice_of_attention_is_named():
    key = "actor_rollout_ref.model.override_config.attn_implementation"
    assert "our own" in idle({key: "flash_attention_2"})[key]


def test_offloading_weights_that_the_rollout_shares_is_explained():
    key = f"{A}.fsdp_config.param_offload"
    alone = {**GRPO, key: True, "trainer.n_gpus_per_node": 1}
    assert "stay on the device" in idle(alone)[key]
    assert idle({**alone, f"{R}.name": "vllm"}) == {}
