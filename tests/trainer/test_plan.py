"""The plan: batch sizes, placement and memory as a run would have them."""

import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.schema import nested
from verl.config.validate import validate
from verl.trainer.plan.layout import batch_table, placement, row_count, row_faults
from verl.trainer.plan.memory import memory_plan
from verl.trainer.plan.render import make_plan, print_plan
from verl.trainer.plan.shape import length_notices

A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"
GRPO = {"algorithm.adv_estimator": "grpo", f"{R}.n": 8}
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
PARAMS = 7_615_616_512


def load(values):
    by_path = {tuple(key.split(".")): value for key, value in values.items()}
    return load_config(nested(by_path), PPOConfig, overrides=[f"{key}=" for key in values])


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return str(folder)


def test_the_batch_table_follows_from_three_numbers():
    """128 prompts x 8 responses, mini-batches of 64 prompts, 4 ranks, micro-batches of 3."""
    table = batch_table(
        load(
            {
                **GRPO,
                "data.train_batch_size": 128,
                f"{A}.ppo_mini_batch_size": 64,
                f"{A}.ppo_micro_batch_size_per_gpu": 3,
                f"{A}.ppo_epochs": 2,
                "trainer.n_gpus_per_node": 4,
            }
        ).checked()
    )
    assert (table.prompts, table.responses_per_prompt, table.sequences) == (128, 8, 1024)
    (actor,) = table.updates
    assert (actor.mini_batches, actor.optimizer_steps) == (2, 4)
    assert (actor.sequences_per_mini_batch, actor.sequences_per_rank) == (512, 128)
    assert (actor.micro_batches, actor.micro_batch) == ("43", "3 sequences")


def test_token_budgets_bound_the_number_of_micro_batches():
    """32 sequences per rank of at most 1,024 tokens in a budget of 4,096: at most 8."""
    table = batch_table(
        load({f"{A}.use_dynamic_bsz": True, f"{A}.ppo_max_token_len_per_gpu": 4096}).checked()
    )
    actor, critic = table.updates
    assert (actor.micro_batches, actor.micro_batch) == ("at most 8", "by tokens, budget 4,096")
    assert critic.micro_batch == "by tokens, budget 32,768"


def test_ranks_that_share_a_sequence_count_once():
    values = {**GRPO, f"{A}.ulysses_sequence_parallel_size": 2}
    (actor,) = batch_table(load(values).checked()).updates
    assert actor.sequences_per_rank == 256 * 8 // 4


def test_steps_are_counted_from_the_rows_of_the_file(tmp_path):
    """1,000 rows in batches of 64 are 15 steps, three epochs 45, a tenth of them warm-up 4."""
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"prompt": ["x"] * 1000}), path)
    values = {
        "data.train_files": str(path),
        "data.train_batch_size": 64,
        f"{A}.ppo_mini_batch_size": 64,
        f"{A}.optim.lr_warmup_steps_ratio": 0.1,
        "trainer.total_epochs": 3,
    }
    schedule = batch_table(load(values).checked()).schedule
    assert (schedule.rows, schedule.steps_per_epoch) == (1000, 15)
    assert (schedule.total_steps, schedule.warmup_steps) == (45, 4)
    capped = batch_table(load({**values, "data.train_max_samples": 128}).checked()).schedule
    assert (capped.rows, capped.total_steps) == (128, 6)
    assert row_count([str(path), str(path)]) == (2000, "")
    assert row_count("gone.parquet") == (None, "gone.parquet is not here")
    assert row_count("rows.json")[0] is None


def test_placement_names_controller_roles_and_engines():
    plan = placement(
        load({f"{R}.tensor_model_parallel_size": 2, f"{A}.use_kl_loss": True}).checked()
    )
    assert (plan.controller, plan.ranks) == ("ray", 8)
    whole = "whole on each of 8 ranks, the optimizer's state sharded"
    assert {role.role: role.layout for role in plan.roles} == {
        "actor": f"{whole}, if that fits; else fsdp over 8 ranks",
        "rollout": "native, 4 engines, tensor parallel 2",
        "reference": "a frozen copy",
        "critic": f"{whole}, if that fits; else fsdp over 8 ranks",
    }


def test_placement_says_what_ranks_divide_where_it_was_chosen():
    def layouts(sharding):
        values = {**GRPO, f"{A}.fsdp_config.sharding": sharding, f"{A}.fsdp_config.fsdp_size": 4}
        return [role.layout for role in placement(load(values).checked()).roles]

    engines = "native, 8 engines, tensor parallel 1"
    assert layouts("full") == ["fsdp over 4 ranks, 2 copies", engines]
    whole = "whole on each of 8 ranks, the optimizer's state sharded"
    assert layouts("zero1") == [whole, f"{engines}, on the trainer's own weights"]


def test_one_device_needs_no_ray_and_no_second_copy():
    plan = placement(load({**GRPO, "trainer.n_gpus_per_node": 1}).checked())
    assert plan.controller == "local"
    assert [role.layout for role in plan.roles] == [
        "one device, not sharded",
        "native, 1 engine, tensor parallel 1, on the trainer's own weights",
    ]


def test_roles_run_on_their_own_devices_if_told_so():
    values = {
        "resource_pool.actor_rollout_ref.devices": [0, 1, 2, 3],
        "resource_pool.critic.devices": [4, 5],
        "reward_model.enable": True,
        "reward_model.model.path": "org/rm",
        "resource_pool.reward_model.devices": [6, 7],
    }
    config = load(values).checked()
    pools = {role.role: role.pool for role in placement(config).roles}
    assert pools["actor"] == pools["rollout"] == "devices 0, 1, 2, 3"
    assert pools["critic"] == "devices 4, 5"
    assert pools["reward model"] == "devices 6, 7"
    actor, critic = batch_table(config).updates
    assert (actor.sequences_per_rank, critic.sequences_per_rank) == (256 // 4, 256 // 2)


def phases(values):
    return {phase.name: phase for phase in memory_plan(load(values).checked()).phases}


def test_memory_on_one_device(model_folder):
    """bf16 weights 2, master and moments 12, gradients 2 bytes per parameter; no second copy."""
    plan = phases(
        {
            **GRPO,
            "actor_rollout_ref.model.path": model_folder,
            "trainer.n_gpus_per_node": 1,
            f"{R}.max_num_seqs": 64,
            f"{A}.ppo_micro_batch_size_per_gpu": 1,
        }
    )
    update = plan["update actor"].parts
    assert update["weights"] == 2 * PARAMS
    assert update["optimizer"] == 12 * PARAMS
    assert update["gradients"] == 2 * PARAMS
    assert "engine weights" not in plan["rollout"].parts
    kv_bytes_per_token = 2 * 2 * 28 * 4 * 128  # keys and values, bf16, layers, heads, head size
    assert plan["rollout"].parts["KV cache"] == 64 * 1024 * kv_bytes_per_token + (1 << 30)
    layer = 2 * (5 * 3584 + 2 * (28 + 4) * 128 + 3 * 18944)
    # Logits of the response, the output layer's gradient in fp32 and hidden states are more than
    # a layer computed again.
    head = 2 * 152064 * 512 + 4 * 152064 * 3584 + 2 * 3584 * (1024 + 2 * 512)
    assert head > 1024 * layer
    assert update["activations"] == 28 * 2 * 3584 * 1024 + head
    assert plan["rollout"].parts["prefill"] == 8192 * layer + 2 * 152064 * 64


def test_memory_is_divided_over_the_ranks(model_folder):
    plan = phases({**GRPO, "actor_rollout_ref.model.path": model_folder, f"{R}.name": "vllm"})
    update = plan["update actor"].parts
    assert update["weights"] == 4 * PARAMS / 8
    assert update["optimizer"] == 8 * PARAMS / 8
    assert update["gradients"] == 4 * PARAMS / 8
    assert plan["rollout"].parts["engine weights"] == 2 * PARAMS


def test_ranks_with_whole_weights_divide_the_optimizer_state_and_share_them_with_the_rollout(
    model_folder,
):
    zero1 = {
        f"{A}.fsdp_config.sharding": "zero1",
        "actor_rollout_ref.ref.fsdp_config.sharding": "zero1",
    }
    plan = phases(
        {**GRPO, "actor_rollout_ref.model.path": model_folder, **zero1, f"{A}.use_kl_loss": True}
    )
    update = plan["update actor"].parts
    assert update["weights"] == 2 * PARAMS
    assert update["optimizer"] == 12 * PARAMS / 8
    assert update["gradients"] == 2 * PARAMS
    assert update["reference"] == 2 * PARAMS
    assert "engine weights" not in plan["rollout"].parts


def test_offloading_keeping_activations_and_references_show(model_folder):
    base = {**GRPO, "actor_rollout_ref.model.path": model_folder}
    plain = phases(base)
    offloaded = phases({**base, f"{A}.fsdp_config.optimizer_offload": True})
    assert offloaded["rollout"].parts["optimizer"] == 0
    assert offloaded["update actor"].parts["optimizer"] > 0
    keeping = phases({**base, "actor_rollout_ref.model.enable_gradient_checkpointing": False})
    assert (
        keeping["update actor"].parts["activations"]
        > 5 * plain["update actor"].parts["activations"]
    )
    with_reference = phases({**base, f"{A}.use_kl_loss": True})
    assert with_reference["load"].parts["reference"] == 2 * PARAMS / 8  # frozen: no fp32
    adapters = phases({**base, f"{A}.use_kl_loss": True, "actor_rollout_ref.model.lora_rank": 8})
    assert "reference" not in adapters["load"].parts
    assert adapters["load"].parts["optimizer"] < plain["load"].parts["optimizer"] / 300
    other = {f"{A}.use_kl_loss": True, "actor_rollout_ref.ref.model.path": model_folder}
    own = phases({**base, **other, "actor_rollout_ref.model.lora_rank": 8})
    assert own["load"].parts["reference"] == with_reference["load"].parts["reference"]


def test_a_critic_has_a_phase_of_its_own(model_folder):
    plan = phases({"actor_rollout_ref.model.path": model_folder})
    assert "update critic" in plan
    adapters = phases({"actor_rollout_ref.model.path": model_folder, "critic.model.lora_rank": 8})
    assert adapters["load"].parts["critic"] < plan["load"].parts["critic"] / 2
    value_params = PARAMS - 152064 * 3584 + 3584
    assert plan["load"].parts["critic"] == 12 * value_params / 8


def test_without_config_json_memory_is_unknown_and_says_why():
    plan = memory_plan(load({"actor_rollout_ref.model.path": "org/name"}).checked())
    assert plan.shape is None
    assert plan.reason == "config.json not found at org/name"


def test_a_config_json_of_another_kind_is_no_crash(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": 8}')
    plan = memory_plan(load({"actor_rollout_ref.model.path": str(tmp_path)}).checked())
    assert plan.shape is None
    assert "KeyError('num_attention_heads')" in plan.reason


def test_the_printed_plan_is_plain_readable_and_narrow(model_folder, capsys):
    loaded = load(
        {
            **GRPO,
            "actor_rollout_ref.model.path": model_folder,
            "critic.optim.lr": 1e-3,
            "trainer.save_freq": 10,
            "data.train_batch_size": 256,
            "data.train_files": "nowhere/train.parquet",
            f"{R}.name": "vllm",
        }
    )
    faults = validate(loaded.checked(), loaded.user_set)
    print_plan(make_plan(loaded, faults))
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in shown
    assert lines[0] == "Set by you"
    assert "  actor_rollout_ref.rollout.n=8 " in shown
    assert "  responses per step               2,048, each at most 1,024 tokens" in shown
    assert "  actor: optimizer steps per step  1 (1 mini-batch)" in shown
    assert "  rows                             unknown (nowhere/train.parquet is not here)" in shown
    assert "  qwen2, 7.62B parameters" in shown
    assert "Set, but without effect\n  - critic.optim.lr: there is no critic" in shown
    assert "Missing on this machine\n  - data.train_files is" in shown
    assert 'pip install "verl[vllm]"' in shown
    assert not any(line != line.rstrip() for line in lines)


def test_a_file_without_rows_is_refused_in_the_plan(tmp_path):
    def faults(path):
        config = load_config({"data": {"train_files": str(path)}}, PPOConfig).config
        return [fault.text for fault in row_faults(config)]

    empty, broken = tmp_path / "empty.parquet", tmp_path / "broken.parquet"
    parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    broken.touch()
    assert faults(empty) == [f"data.train_files ({empty}) has no rows"]
    assert f"data.train_files ({broken}) cannot be read" in faults(broken)[0]
    assert faults(tmp_path / "gone.parquet") == []


def test_files_that_hold_no_prompts_are_refused_in_the_plan(tmp_path):
    def faults(**data):
        config = load_config({"data": {"val_files": [], **data}}, PPOConfig).config
        return [fault.text for fault in row_faults(config)]

    questions, table = tmp_path / "questions.parquet", tmp_path / "rows.csv"
    parquet.write_table(pa.table({"question": ["1+1"] * 3}), questions)
    table.write_text("prompt\n1+1\n")
    kinds = "neither .parquet, .json, .jsonl nor .ndjson"
    for option in ("train_files", "val_files"):
        (fault,) = faults(**{option: str(table)})
        assert fault.startswith(f"data.{option} ({table}) is {kinds}")
    (fault,) = faults(train_files=str(questions))
    assert "has no column 'prompt' (data.prompt_key); its columns are ['question']" in fault
    few = {"train_files": str(questions), "prompt_key": "question", "train_batch_size": 4}
    assert faults(**few, custom_cls={"path": "mine.py", "name": "Mine"}) == []
    assert faults(**{**few, "train_batch_size": 3}) == []
    (fault,) = faults(**few)
    assert fault.endswith(
        "has 3 rows and data.train_batch_size is 4; lower data.train_batch_size or add rows"
    )


def test_sequences_beyond_the_models_positions_are_worth_a_look(tmp_path):
    described = {**QWEN_7B, "max_position_embeddings": 1000}
    (tmp_path / "config.json").write_text(json.dumps(described))

    def notices(length, **scaling):
        model = {"path": str(tmp_path), "override_config": scaling}
        values = {"actor_rollout_ref": {"model": model}, "data": {"max_response_length": length}}
        return length_notices(load_config(values, PPOConfig).config)

    assert notices(488) == []
    (notice,) = notices(489)
    assert "may have 1,001 tokens, and the model has max_position_embeddings 1,000" in notice
    assert notices(489, max_position_embeddings=2000) == []
    assert notices(489, rope_scaling={"type": "yarn", "factor": 2.0}) == []
    plan = make_plan(
        load_config(
            {
                "data": {"max_response_length": 489},
                "actor_rollout_ref": {"model": {"path": str(tmp_path)}},
            },
            PPOConfig,
        ),
        [],
    )
    assert notice in plan.advice


def phases_of(values, folder, shape=QWEN_7B):
    (folder / "config.json").write_text(json.dumps(shape))
    keys = {**GRPO, "actor_rollout_ref.model.path": str(folder), "trainer.device": "cuda", **values}
    plan = memory_plan(load(keys).checked())
    return {phase.name: phase.parts for phase in plan.phases}, plan


def test_fp8_weights_lie_beside_those_that_are_trained(tmp_path):
    """One byte for each weight of attention and MLP; a cache in fp8 is half of one in bf16."""
    one = {"trainer.n_gpus_per_node": 1}
    plain, _ = phases_of(one, tmp_path)
    low, _ = phases_of({**one, f"{R}.quantization": "fp8", f"{R}.kv_cache_dtype": "fp8"}, tmp_path)
    hidden, inner, heads, kv = 3584, 18944, 28 * 128, 4 * 128
    layer = 2 * hidden * heads + 2 * hidden * kv + heads + 2 * kv + 3 * hidden * inner
    assert low["rollout"]["fp8 weights"] == 28 * layer
    assert "engine weights" not in low["rollout"], "the engine shares the trained ones"
    sessions = 1 << 30
    caches = [plan["rollout"]["KV cache"] - sessions for plan in (low, plain)]
    assert caches[0] == caches[1] / 2


EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}


def test_a_frozen_tower_has_weights_and_no_optimizer(tmp_path):
    sees = {
        "model_type": "qwen2_5_vl",
        "text_config": {**QWEN_7B, "model_type": "qwen2_5_vl_text"},
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584,
        },
    }  # fmt: skip
    one = {"trainer.n_gpus_per_node": 1}
    trained, plan = phases_of(one, tmp_path, sees)
    frozen, _ = phases_of({**one, f"{A}.freeze_vision_tower": True}, tmp_path, sees)
    tower = plan.shape.tower_params
    assert 0.6e9 < tower < 0.7e9, "Qwen2.5-VL-7B has 8.29 billion parameters"
    assert trained["load"]["weights"] == frozen["load"]["weights"] == 2 * (PARAMS + tower)
    assert trained["load"]["optimizer"] - frozen["load"]["optimizer"] == 12 * tower


def test_fp8_and_adapters_count_experts(tmp_path):
    one = {"trainer.n_gpus_per_node": 1}
    low, _ = phases_of({**one, f"{R}.quantization": "fp8"}, tmp_path, EXPERTS)
    attention = 512 * (2 * 8 * 64 + 2 * 2 * 64) + 2 * 64
    assert low["rollout"]["fp8 weights"] == 10 * (attention + 64 * 3 * 512 * 256)
    lora = {**one, "actor_rollout_ref.model.lora_rank": 4}
    plain, _ = phases_of(lora, tmp_path, EXPERTS)
    named = {"actor_rollout_ref.model.target_modules": ["all-linear", "experts"]}
    experts, _ = phases_of({**lora, **named}, tmp_path, EXPERTS)
    more = experts["load"]["optimizer"] - plain["load"]["optimizer"]
    assert more == 12 * 4 * 10 * 64 * (512 + 2 * 256 + 256 + 512)


def test_experts_that_stay_on_their_ranks_are_not_gathered(tmp_path):
    ranks = {"trainer.n_gpus_per_node": 8, f"{A}.fsdp_config.sharding": "full"}
    key = f"{A}.fsdp_config.expert_parallel_size"
    gathered = [
        phases_of({**ranks, key: size}, tmp_path, EXPERTS)[0]["update actor"]["working weights"]
        for size in (1, 8)
    ]
    of_layer = 3 * 64 * 512 * 256
    # In bf16: two layers' experts are not gathered; this rank's own are, from fp32.
    assert gathered[0] - gathered[1] == pytest.approx(2 * (2 * of_layer - 10 * of_layer / 8))


def test_the_time_of_an_update_is_bytes_over_the_slowest_link(tmp_path):
    assert phases_of({"trainer.n_gpus_per_node": 1}, tmp_path)[1].sync.seconds == 0
    sharded = {f"{A}.fsdp_config.sharding": "full", f"{R}.tensor_model_parallel_size": 4}
    in_node = phases_of({**sharded, "trainer.n_gpus_per_node": 8}, tmp_path)[1].sync
    assert in_node.num_bytes == 2 * PARAMS
    assert in_node.seconds == pytest.approx(2 * PARAMS / 150e9)
    across = {**sharded, "trainer.n_gpus_per_node": 8, "trainer.nnodes": 2}
    assert phases_of(across, tmp_path)[1].sync.seconds == pytest.approx(2 * PARAMS / 25e9)


def test_the_page_on_large_models_is_what_the_planner_says():
    from scripts.large_models import PAGE, page

    assert PAGE.read_text() == page(), "run python scripts/large_models.py"
