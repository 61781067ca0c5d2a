"""Keys of verl 0.8 and 0.9 that no option here has: what they mean, or why they mean nothing.

Each entry becomes a rule of `verl.config.legacy`, which applies only while the schema has no option
of that name. An entry with `off` says nothing about those values, which ask for nothing; a quiet
one says nothing at all, since it stands behind a switch that has an entry of its own.
"""

from typing import Any, NamedTuple

OFF = (False, None, 0, "")
MBRIDGE = "our own table converts Megatron's weights"
RESHARDED = "checkpoints are read by any layout"
MUON = "Megatron's Muon is not built in; optim.optimizer and optim.optimizer_impl name another"
PACKED = "sequences are packed without padding"
HOOKS = "results stay where the profiler writes them: start what should follow after the run"
STEPS = "global_profiler.steps lists the steps to profile"
QAT = "quantization-aware training is not built in"
CHUNKS = "a chunk has as many tokens as fit a workspace of fixed size"
ONE_BATCH = "dynamic sampling generates one batch after the other"
ROLES = "the actor's model decides: tokenizer and templates are the actor's"


class Entry(NamedTuple):
    """One key, or all below it; a leading `*` stands for any way to it.

    `new` is today's key, None for a key without effect, which `why` explains. `refuses` ends the
    run for values other than those in `off`.
    """

    old: str
    new: str | None = None
    why: str = ""
    off: tuple[Any, ...] = ()
    refuses: bool = False
    is_quiet: bool = False


def moved(old: str, new: str) -> Entry:
    return Entry(old, new)


def idle(old: str, why: str, *off: Any) -> Entry:
    return Entry(old, None, why, off)


def refused(old: str, why: str, *off: Any) -> Entry:
    return Entry(old, None, why, (*OFF, *off), refuses=True)


def behind(switch: str, section: str, why: str) -> tuple[Entry, Entry]:
    """A section with a switch: on is refused, and the rest of it means nothing while it is off."""
    return refused(f"{section}.{switch}", why), Entry(section, None, why, is_quiet=True)


ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"

ENTRIES: tuple[Entry, ...] = (
    # Moved.
    moved("critic.fsdp", "critic.model.fsdp_config"),
    moved("critic.model.lora.rank", "critic.model.lora_rank"),
    moved("critic.model.lora.alpha", "critic.model.lora_alpha"),
    moved("actor_rollout_ref.model.lora.alpha", "actor_rollout_ref.model.lora_alpha"),
    moved("sandbox_fusion", "reward_model.sandbox_fusion"),
    moved("skip.rollout.enable", f"{ROLLOUT}.skip_rollout"),
    moved("skip.rollout.dump_dir", f"{ROLLOUT}.skip_dump_dir"),
    moved("skip.rollout.steps", f"{ROLLOUT}.skip_steps"),
    moved(f"{ACTOR}.megatron.router_replay", f"{ACTOR}.router_replay"),
    moved("actor_rollout_ref.ref.megatron.router_replay", "actor_rollout_ref.ref.router_replay"),
    moved("reward_model.model_path", "reward_model.model.path"),
    # Rollout.
    refused("skip.rollout.action", "a dump serves the step that it was made in", "cache"),
    *behind("enable", "skip.rollout_tq", "use skip.rollout, which reads whole steps"),
    *behind("enable", "skip.async_rollout", "asynchronous runs do not read dumps"),
    *behind("enabled", f"{ROLLOUT}.disaggregation", "an engine prefills and decodes itself"),
    idle(f"{ROLLOUT}.full_determinism", "every sample has a seed of its own", *OFF),
    idle(f"{ROLLOUT}.seed", "data.seed is the seed of the whole run", 42, None),
    refused(f"{ROLLOUT}.checkpoint_engine.custom_backend_module", "weights travel as backend says"),
    idle(f"{ROLLOUT}.trace.project_name", "trainer.project_name names the traces", None),
    idle(f"{ROLLOUT}.trace.experiment_name", "trainer.experiment_name names the traces", None),
    idle(f"{ROLLOUT}.moe_load_balance_metrics_interval", "the engine reports no loads", *OFF),
    *behind("enabled", "reward_model.rollout.disaggregation", "an engine prefills itself"),
    *(
        idle(f"reward_model.rollout.{name}", "a reward model draws no samples", default, None)
        for name, default in {
            "do_sample": True,
            "full_determinism": False,
            "ignore_eos": False,
            "layered_summon": False,
            "mtp": None,
            "multi_stage_wake_up": False,
            "n": 1,
            "pipeline_model_parallel_size": 1,
            "quantization": None,
            "quantization_config_file": None,
            "scheduling_policy": "fcfs",
            "seed": 42,
            "temperature": 1.0,
            "top_k": -1,
            "top_p": 1,
        }.items()
    ),
    # Training.
    *behind("enable", "*.qat", QAT),
    Entry("*.turbo_config", None, "it belongs to an engine that is not built in", is_quiet=True),
    idle("*.entropy_from_logits_chunk_size", CHUNKS, 2048, None),
    idle("*.pad_to_length", PACKED, *OFF),
    idle("*.pad_to_length_bucket", PACKED, 1024, 512, None),
    idle("*.checkpoint.strict", "a checkpoint is always read as a whole", True, None),
    idle("*.checkpoint.mbridge_config", MBRIDGE, {}, None),
    refused("critic.loss_scale_factor", "the critic's loss divides by the padded response length"),
    idle("critic.model.hf_config_path", ROLES, None),
    idle("critic.model.custom_chat_template", ROLES, None),
    idle("critic.model.use_liger", "our kernels take its place", *OFF),
    idle("critic.model.use_fused_kernels", "the value head has no vocabulary to fuse", *OFF),
    Entry("critic.model.fused_kernel_options", None, "nothing is fused there", is_quiet=True),
    refused("critic.model.exclude_modules", "adapters of the critic are in target_modules"),
    refused("critic.model.lora_adapter_path", "the critic's adapters start anew"),
    *behind("enable", "critic.model.mtp", "a critic predicts no tokens"),
    idle("algorithm.filter_groups.max_inflight_gen_batches", ONE_BATCH, 1),
    # Data.
    idle("data.audio_key", "there are no audio models", "audios", None),
    # Profilers.
    *(
        refused(f"{way}.{name}", HOOKS, [])
        for way in ("*.profiler", "global_profiler")
        for name in (
            "relocate_results",
            "finish_hook_cmd",
            "finish_hook_all_ranks",
            "finish_hook_ranks",
        )
    ),
    idle("*.tool_config.torch.schedule", STEPS, *OFF),
    refused("*.tool_config.npu.profile_token_start", STEPS),
    refused("*.tool_config.npu.profile_token_end", STEPS),
    refused("*.tool_config.torch.profile_token_start", STEPS),
    refused("*.tool_config.torch.profile_token_end", STEPS),
    *behind("config_path", "*.tool_config.precision_debugger", "use tool=torch"),
    *behind("config_path", "*.global_tool_config.precision_debugger", "use tool=torch"),
    # Megatron.
    *(
        Entry(f"*.optim.{name}", None, MUON, is_quiet=name.startswith("muon"))
        for name in (
            "use_precision_aware_optimizer",
            "main_grads_dtype",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
            "use_layer_wise_distributed_optimizer",
            *(
                f"muon_{setting}"
                for setting in (
                    "momentum", "nesterov", "split_qkv", "scale_mode", "coefficient_type",
                    "num_ns_steps", "tp_mode", "fp32_matmul_prec", "extra_scale_factor",
                    "scalar_optimizer", "match_adamw_update_rms",
                )
            ),
        )
    ),
    refused("*.megatron.dynamic_context_parallel", "context_parallel_size holds for every pass"),
    idle("*.megatron.max_seqlen_per_dp_cp_rank", "it belongs to dynamic_context_parallel", None),
    idle("*.megatron.dist_ckpt_optim_fully_reshardable", RESHARDED, *OFF, True),
    idle("*.megatron.distrib_optim_fully_reshardable_mem_efficient", RESHARDED, *OFF, True),
    idle("*.megatron.entropy_from_logits_with_chunking", "entropy is always in chunks", *OFF),
    idle("*.megatron.pad_bshd_to_minibatch_max", PACKED, *OFF),
    refused("*.megatron.use_megatron_fsdp", "it is not built in: strategy=fsdp shards weights"),
    Entry("*.megatron.router_replay", None, "the actor's counts", is_quiet=True),
)  # fmt: skip
"""In order: the first that fits a key is taken."""
