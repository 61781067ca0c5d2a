"""Keys of verl 0.8 and 0.9 that no option here has: what they mean, or why they mean nothing.

Each entry becomes a rule of `verl.config.legacy`, which applies only while the schema has no option
of that name. An entry with `off` says nothing about those values, which ask for nothing: they are
what verl's own files state, and null.
"""

from collections.abc import Mapping
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
ONE_ENGINE = "an engine prefills and decodes itself"
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


def moved(old: str, new: str) -> Entry:
    return Entry(old, new)


def idle(old: str, why: str, *off: Any) -> Entry:
    return Entry(old, None, why, off)


def refused(old: str, why: str, *off: Any) -> Entry:
    return Entry(old, None, why, (*OFF, *off), refuses=True)


def section(old: str, why: str, defaults: Mapping[str, Any]) -> tuple[Entry, ...]:
    """A section without effect: its keys, and whatever else lies below it."""
    listed = (idle(f"{old}.{name}", why, value, None) for name, value in defaults.items())
    return *listed, idle(old, why, None, {})


def behind(switch: str, old: str, why: str, defaults: Mapping[str, Any]) -> tuple[Entry, ...]:
    """A section with a switch: on is refused, and the rest of it means nothing while it is off."""
    return refused(f"{old}.{switch}", why), *section(old, why, defaults)


QAT_DEFAULTS = {
    "mode": "w4a16",
    "group_size": 16,
    "activation_observer": "static_minmax",
    "quantization_config_path": None,
}
QAT_IGNORED = (["lm_head", "embed_tokens", "re:.*mlp.gate$"], ["lm_head", "*mlp.gate"])
TURBO_DEFAULTS = {
    "distributed.fully_shard_parallel_size": 16,
    "distributed.tensor_parallel_size": 1,
    "distributed.expert_parallel_size": 1,
    "distributed.expert_fully_shard_parallel_size": 1,
    "distributed.ulysses_parallel_size": 1,
    "distributed.fsdp_plan.param_dtype": "bf16",
    "distributed.fsdp_plan.reduce_dtype": "fp32",
    "distributed.fsdp_plan.output_dtype": "bf16",
    "distributed.fsdp_plan.fsdp_implementation": "native",
    "distributed.fsdp_plan.num_to_forward_prefetch": 1,
    "distributed.fsdp_plan.num_to_backward_prefetch": 1,
}
MUON_DEFAULTS = {
    "use_precision_aware_optimizer": False,
    "main_grads_dtype": "fp32",
    "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32",
    "use_layer_wise_distributed_optimizer": False,
    "muon_momentum": 0.95,
    "muon_nesterov": False,
    "muon_split_qkv": True,
    "muon_scale_mode": "spectral",
    "muon_coefficient_type": "quintic",
    "muon_num_ns_steps": 5,
    "muon_tp_mode": "blockwise",
    "muon_fp32_matmul_prec": "medium",
    "muon_extra_scale_factor": 1.0,
    "muon_scalar_optimizer": "adam",
    "muon_match_adamw_update_rms": False,
}
SPLIT_DEFAULTS = {
    "prefill_replicas": 1,
    "decode_replicas": 1,
    "transfer_backend": "nixl",
}
MTP_DEFAULTS = {
    "enable_train": False,
    "enable_rollout": False,
    "detach_encoder": False,
    "method": "mtp",
    "mtp_loss_scaling_factor": 0.1,
    "num_speculative_tokens": 1,
    "speculative_algorithm": "EAGLE",
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_num_steps": 3,
}
SKIP_DEFAULTS = {"action": "cache", "dump_dir": "~/.verl/rollout_dump", "steps": []}
DEBUGGER_DEFAULTS = {"strict": False}
REPLAY_DEFAULTS = {"mode": "disabled"}

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"

ENTRIES: tuple[Entry, ...] = (
    # Moved.
    moved("critic.fsdp", "critic.model.fsdp_config"),
    *(
        moved(f"critic.model_config.{name}", f"critic.model.{name}")
        for name in (
            "path",
            "tokenizer_path",
            "override_config",
            "external_lib",
            "trust_remote_code",
            "enable_gradient_checkpointing",
            "enable_activation_offload",
            "lora_rank",
            "lora_alpha",
            "target_modules",
        )
    ),
    idle("critic.model_config", "critic.model describes the critic's model", None, {}),
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
    *behind("enable", "skip.rollout_tq", "skip.rollout reads whole steps", SKIP_DEFAULTS),
    *behind("enable", "skip.async_rollout", "asynchronous runs do not read dumps", SKIP_DEFAULTS),
    *behind("enabled", f"{ROLLOUT}.disaggregation", ONE_ENGINE, SPLIT_DEFAULTS),
    idle(f"{ROLLOUT}.full_determinism", "every sample has a seed of its own", *OFF),
    idle(f"{ROLLOUT}.seed", "data.seed is the seed of the whole run", 42, None),
    refused(f"{ROLLOUT}.checkpoint_engine.custom_backend_module", "weights travel as backend says"),
    idle(f"{ROLLOUT}.trace.project_name", "trainer.project_name names the traces", None),
    idle(f"{ROLLOUT}.trace.experiment_name", "trainer.experiment_name names the traces", None),
    idle(f"{ROLLOUT}.moe_load_balance_metrics_interval", "the engine reports no loads", *OFF),
    *behind("enabled", "reward_model.rollout.disaggregation", ONE_ENGINE, SPLIT_DEFAULTS),
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
    idle("*.qat.ignore_patterns", QAT, *QAT_IGNORED, None),
    *behind("enable", "*.qat", QAT, QAT_DEFAULTS),
    *section("*.turbo_config", "it belongs to an engine that is not built in", TURBO_DEFAULTS),
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
    *section("critic.model.fused_kernel_options", "nothing is fused", {"impl_backend": "torch"}),
    refused("critic.model.exclude_modules", "adapters of the critic are in target_modules"),
    refused("critic.model.lora_adapter_path", "the critic's adapters start anew"),
    *behind("enable", "critic.model.mtp", "a critic predicts no tokens", MTP_DEFAULTS),
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
    *(
        entry
        for way in ("*.tool_config", "*.global_tool_config")
        for entry in behind(
            "config_path", f"{way}.precision_debugger", "use tool=torch", DEBUGGER_DEFAULTS
        )
    ),
    # Megatron.
    *(idle(f"*.optim.{name}", MUON, value, None) for name, value in MUON_DEFAULTS.items()),
    refused("*.megatron.dynamic_context_parallel", "context_parallel_size holds for every pass"),
    idle("*.megatron.max_seqlen_per_dp_cp_rank", "it belongs to dynamic_context_parallel", None),
    idle("*.megatron.dist_ckpt_optim_fully_reshardable", RESHARDED, *OFF),
    idle("*.megatron.distrib_optim_fully_reshardable_mem_efficient", RESHARDED, *OFF),
    idle("*.megatron.entropy_from_logits_with_chunking", "entropy is always in chunks", *OFF),
    idle("*.megatron.pad_bshd_to_minibatch_max", PACKED, True, None),
    refused("*.megatron.use_megatron_fsdp", "it is not built in: strategy=fsdp shards weights"),
    *section("*.megatron.router_replay", "the actor's counts", REPLAY_DEFAULTS),
)  # fmt: skip
"""In order: the first that fits a key is taken."""
