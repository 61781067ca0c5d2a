"""A composed or a bare configuration becomes one typed tree over the defaults."""

import pytest
from omegaconf import OmegaConf

from tests.config.composing import from_command_line
from verl.config.convert import to_dictconfig
from verl.config.engine import McoreEngineConfig
from verl.config.faults import ConfigError
from verl.config.load import load_config
from verl.config.optimizer import McoreOptimizerConfig
from verl.config.ppo import PPOConfig, PPOMegatronConfig
from verl.config.schema import ROOTS
from verl.config.sft import SFTConfig, SFTEngineConfig


@pytest.mark.parametrize("name", ROOTS)
def test_the_generated_files_are_the_defaults(name):
    composed = from_command_line(config_name=name)
    assert composed.loaded.user_set == frozenset()
    assert composed.notices == []
    assert composed.config == load_config({}, ROOTS[name]).checked()


def test_what_differs_from_the_defaults_was_set_by_the_user():
    loaded = load_config({"data": {"train_batch_size": 512, "max_prompt_length": 512}}, PPOConfig)
    assert loaded.user_set == {"data.train_batch_size"}


def test_what_stands_on_the_command_line_was_set_even_if_it_is_the_default():
    loaded = from_command_line("data.max_prompt_length=512").loaded
    assert loaded.user_set == {"data.max_prompt_length"}


def test_followers_follow_what_the_user_set():
    config = load_config(
        {"data": {"max_response_length": 99}, "actor_rollout_ref": {"actor": {"clip_ratio": 0.3}}},
        PPOConfig,
    ).checked()
    assert config.actor_rollout_ref.rollout.response_length == 99
    assert config.actor_rollout_ref.actor.clip_ratio_high == 0.3


def test_a_key_below_a_section_that_follows_another_changes_only_itself():
    config = load_config(
        {
            "reward_model": {"profiler": {"tool_config": {"torch": {"discrete": True}}}},
            "actor_rollout_ref": {
                "actor": {"profiler": {"tool_config": {"npu": {"level": "level1"}}}}
            },
        },
        PPOConfig,
    ).checked()
    assert config.reward_model.profiler.tool_config.torch.discrete is True
    assert config.reward_model.profiler.tool_config.npu.level == "level1"
    assert config.actor_rollout_ref.actor.profiler.tool_config.torch.discrete is False


def test_a_section_with_nothing_below_it_sets_nothing():
    loaded = load_config(OmegaConf.create("critic:\ntrainer: {}\ndata: {seed: 3}"), PPOConfig)
    assert loaded.user_set == {"data.seed"}
    assert loaded.checked().critic.ppo_mini_batch_size == 256


def test_a_section_that_may_be_null_may_be_set_to_it():
    values = {"actor_rollout_ref": {"rollout": {"mtp": None}}}
    assert load_config(values, PPOConfig).checked().actor_rollout_ref.rollout.mtp is None


def test_an_unknown_key_in_a_file_is_refused_with_a_suggestion():
    loaded = load_config({"actor_rollout_ref": {"actor": {"ppo_minibatch_size": 8}}}, PPOConfig)
    assert [fault.text for fault in loaded.faults] == [
        "unknown option actor_rollout_ref.actor.ppo_minibatch_size; "
        "did you mean actor_rollout_ref.actor.ppo_mini_batch_size?"
    ]


def test_an_unknown_key_from_somebody_elses_program_is_kept_with_one_notice():
    config = {"recipe": {"depth": 3}, "trainer": {"mine": 1}}
    loaded = load_config(config, PPOConfig, keeps_unknown=True)
    assert loaded.faults == []
    assert loaded.notices == ["kept, though verl has no such option: recipe.depth, trainer.mine"]
    assert loaded.config.recipe.depth == 3
    assert loaded.config.trainer.get("mine") == 1


def test_a_key_added_with_plus_is_kept():
    composed = from_command_line("+trainer.mine.deep=[1,2]")
    assert composed.config.trainer.mine.deep == [1, 2]
    assert composed.loaded.user_set == {"trainer.mine.deep"}


def test_a_variable_that_other_values_refer_to_is_no_unknown_key():
    text = "my: {lr: 3e-6}\nactor_rollout_ref: {actor: {optim: {lr: '${my.lr}'}}}"
    config = load_config(OmegaConf.create(text), PPOConfig).checked()
    assert config.actor_rollout_ref.actor.optim.lr == 3e-6


def test_an_interpolation_that_leads_nowhere_is_a_fault():
    with pytest.raises(ConfigError, match=r"data\.train_batch_size cannot be resolved"):
        load_config({"data": {"train_batch_size": "${no.such.key}"}}, PPOConfig)


def test_faults_of_all_sections_come_together():
    loaded = load_config(
        {
            "actor_rollout_ref": {"actor": {"optim": {"lr": "abc"}}, "rollout": {"top_p": 2}},
            "data": {"truncation": "lefft"},
        },
        PPOConfig,
    )
    assert sorted(fault.text for fault in loaded.faults) == [
        'actor_rollout_ref.actor.optim.lr is "abc" (str); it must be a float',
        "actor_rollout_ref.rollout.top_p is 2.0; it must be at most 1",
        "data.truncation is 'lefft'; it must be one of: error, left, right, middle "
        "(did you mean 'left'?)",
    ]
    with pytest.raises(ConfigError, match="3 faults in the configuration"):
        loaded.checked()


@pytest.mark.parametrize(
    ("strategy", "root"),
    [("megatron", PPOMegatronConfig), ("fsdp", PPOConfig), ("fsdp2", PPOConfig)],
)
def test_the_strategy_chooses_the_schema(strategy, root):
    loaded = load_config({"actor_rollout_ref": {"actor": {"strategy": strategy}}}, PPOConfig)
    assert type(loaded.checked()) is root


def test_a_megatron_file_composed_by_hydra_loads_as_such():
    composed = from_command_line(
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        config_name="ppo_megatron_trainer",
    )
    assert type(composed.config) is PPOMegatronConfig
    assert composed.loaded.user_set == {
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    }


def test_options_of_the_other_back_end_are_kept_beside():
    loaded = load_config(
        {"actor_rollout_ref": {"actor": {"strategy": "megatron", "fsdp_config": {"seed": 1}}}},
        PPOConfig,
    )
    assert loaded.checked().actor_rollout_ref.actor.fsdp_config.seed == 1


def test_sft_engines_are_chosen_by_group():
    composed = from_command_line(
        "engine=megatron",
        "optim=megatron",
        "engine.tensor_model_parallel_size=2",
        config_name="sft_trainer_engine",
    )
    assert isinstance(composed.config.engine, McoreEngineConfig)
    assert isinstance(composed.config.optim, McoreOptimizerConfig)
    assert composed.config.engine.tensor_model_parallel_size == 2
    assert "engine.tensor_model_parallel_size" in composed.loaded.user_set


def test_sft_engines_are_chosen_by_strategy_in_a_bare_file():
    config = load_config({"engine": {"strategy": "megatron"}}, SFTEngineConfig).checked()
    assert isinstance(config.engine, McoreEngineConfig)


@pytest.mark.parametrize(
    ("values", "per_gpu"),
    [
        ({"actor_rollout_ref.actor.ppo_micro_batch_size": 64, "trainer.n_gpus_per_node": 4}, 16),
        (
            {
                "actor_rollout_ref.actor.ppo_micro_batch_size": 32,
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2,
            },
            8,
        ),
    ],
)
def test_a_micro_batch_over_all_gpus_is_divided_by_the_data_parallel_ranks(values, per_gpu):
    composed = from_command_line(*(f"{key}={value}" for key, value in values.items()))
    actor = composed.config.actor_rollout_ref.actor
    assert actor.ppo_micro_batch_size_per_gpu == per_gpu
    assert composed.config.critic.ppo_micro_batch_size_per_gpu == per_gpu  # follows the actor
    assert composed.notices == [
        "actor_rollout_ref.actor.ppo_micro_batch_size is now "
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={per_gpu}"
    ]


def test_a_micro_batch_that_the_ranks_cannot_share_is_a_fault():
    loaded = from_command_line("critic.ppo_micro_batch_size=12").loaded
    assert [fault.text for fault in loaded.faults] == [
        "critic.ppo_micro_batch_size is 12; it is divided by the 8 data-parallel ranks, so it must "
        "be a multiple of 8: 8 and 16; or set critic.ppo_micro_batch_size_per_gpu"
    ]


def test_hooks_get_a_resolved_dictconfig():
    view = to_dictconfig(load_config({"data": {"max_prompt_length": 7}}, PPOConfig).checked())
    assert view.actor_rollout_ref.rollout.prompt_length == 7
    again = load_config(view, PPOConfig, keeps_unknown=True)
    assert again.faults == []
    assert again.config.actor_rollout_ref.rollout.prompt_length == 7


def test_a_typed_configuration_loads_as_itself():
    config = load_config({"data": {"train_batch_size": 64}}, SFTConfig).checked()
    assert load_config(config, SFTConfig).checked() == config


def test_null_leaves_a_number_a_text_or_a_switch_at_its_default():
    values = {
        "custom_reward_function": {"path": "r.py", "name": None},
        "actor_rollout_ref": {"actor": {"optim": {"lr_warmup_steps": None}}},
    }
    config = load_config(values, PPOConfig).checked()
    assert config.custom_reward_function.name == "compute_score"
    assert config.actor_rollout_ref.actor.optim.lr_warmup_steps == -1


def test_an_unset_shell_variable_turns_a_switch_off():
    loaded = load_config({"data": {"shuffle": ""}}, PPOConfig, overrides=["data.shuffle="])
    assert loaded.checked().data.shuffle is False


def test_a_key_that_is_added_is_named():
    values = {"mine": {"depth": 1}, "data": {"seed": 3}}
    loaded = load_config(values, PPOConfig, overrides=["+mine.depth=1", "++data.seed=3"])
    assert loaded.notices == ["kept, though verl has no such option: mine.depth"]
    assert loaded.checked().mine.depth == 1
