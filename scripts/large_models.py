"""Write docs/large_models.md: the plans of three large models, as `trainer.dry_run` computes them.

python scripts/large_models.py [--check]
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.schema import nested
from verl.trainer.plan.layout import placement
from verl.trainer.plan.memory import memory_plan
from verl.trainer.plan.render import billions, gib

PAGE = Path(__file__).parents[1] / "docs" / "large_models.md"
A, R, M = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
COMMON = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 256,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 8192,
    f"{A}.ppo_mini_batch_size": 256,
    f"{A}.use_dynamic_bsz": True,
    f"{A}.ppo_max_token_len_per_gpu": 16384,
    f"{A}.fsdp_config.sharding": "full",
    f"{A}.fsdp_config.ulysses_sequence_parallel_size": 4,
    f"{M}.enable_gradient_checkpointing": True,
    f"{R}.n": 8,
    f"{R}.name": "vllm",
    f"{R}.max_num_seqs": 64,
    f"{R}.log_prob_use_dynamic_bsz": True,
    f"{R}.log_prob_max_token_len_per_gpu": 32768,
    "trainer.n_gpus_per_node": 8,
    "trainer.device": "cuda",
}


@dataclass(frozen=True)
class Example:
    title: str
    shape: dict[str, Any]
    values: dict[str, Any]
    remark: str


EXAMPLES = (
    Example(
        "Llama 70B on 8 nodes of 8 x 80 GB",
        {
            "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
            "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "vocab_size": 128256, "tie_word_embeddings": False,
        },
        {"trainer.nnodes": 8, f"{R}.tensor_model_parallel_size": 8},
        "Generation is the peak, because optimizer and engine are in memory together; "
        "`optimizer_offload=True` takes 8.2 GiB off. A reference adds 2 bytes per parameter over "
        "all ranks.",
    ),
    Example(
        "Qwen3-235B-A22B on 16 nodes of 8 x 80 GB",
        {
            "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288,
            "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
            "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
        },
        {
            "trainer.nnodes": 16, f"{R}.tensor_model_parallel_size": 16,
            f"{A}.fsdp_config.expert_parallel_size": 128,
            f"{A}.ppo_max_token_len_per_gpu": 8192,
        },
        "Experts stay on their ranks and rows travel; without `expert_parallel_size` every rank "
        "gathers the 128 experts of two layers at a time.",
    ),
    Example(
        "DeepSeek-V3 671B on 64 nodes of 8 x 80 GB",
        {
            "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
            "n_shared_experts": 1, "first_k_dense_replace": 3, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "v_head_dim": 128, "vocab_size": 129280, "tie_word_embeddings": False,
        },
        {
            "trainer.nnodes": 64, f"{R}.tensor_model_parallel_size": 32,
            f"{R}.quantization": "fp8", f"{R}.max_num_seqs": 16,
            f"{A}.ppo_max_token_len_per_gpu": 4096,
            f"{R}.log_prob_max_token_len_per_gpu": 8192,
        },
        "Rollout in fp8 over 32 devices an engine. 512 ranks are more than the 256 experts, so "
        "layers are gathered whole (`expert_parallel_size=1`), which is the largest part of the "
        "peak. Keys and values are counted as heads; an engine that caches the latents of its "
        "attention takes a fraction of that.",
    ),
)  # fmt: skip

INTRODUCTION = """# Large models

How runs with 70, 235 and 671 billion parameters are laid out, computed by the planner from their
sizes alone (`python scripts/large_models.py` writes this page). The same tables for a model and
cluster of your own, before anything is loaded:

```bash
python -m verl.trainer.main_ppo trainer.dry_run=True trainer.nnodes=8 \\
    actor_rollout_ref.model.path=/path/to/model ...
```

Assumptions: GRPO without a reference, 256 prompts x 8 responses of at most 1,024 + 8,192 tokens,
activations computed again, four ranks share a sequence, weights and optimizer in fp32 over all
ranks (16 bytes per parameter in all), everything on one pool (hybrid). Memory is per device and in
closed form (`verl/trainer/plan/memory.py`); framework overhead and fragmentation come on top: keep
a tenth free. The time of a weight update is bytes over the slowest link, with the bandwidths that
are stated; it counts neither loading in the engine nor the drift check.

These layouts were computed, not run: the largest machine that these numbers were compared with has
one GPU. There, an H200, the estimate against what torch's allocator held
(`python -m benchmarks.gpu.memory_estimate --cases 0.5B 1.5B 7B-lora --out memory.json`,
[results](../benchmarks/results/gpu/memory.json)), in GiB:

| model | load | rollout | log-prob | update actor |
|---|---|---|---|---|
| 0.5B | 6.50 of 6.52, -0.2% | 10.47 of 10.41, +0.6% | 8.29 of 8.31, -0.2% | 11.74 of 11.72, +0.2% |
| 1.5B | 20.19 of 20.26, -0.4% | 27.68 of 27.64, +0.1% | 22.01 of 22.08, -0.3% | 28.45 of 28.47, -0.1% |
| 7B, LoRA | 15.15 of 15.43, -1.8% | 29.25 of 29.82, -1.9% | 17.68 of 18.26, -3.1% | 21.71 of 22.14, -1.9% |

The largest error is 3.1%. Terms of the estimate were added after an earlier run of these same three
cases, so another kind of model may be farther off. Nothing with several devices was measured.
"""  # noqa: E501


def page() -> str:
    parts = [INTRODUCTION]
    with tempfile.TemporaryDirectory() as folder:
        for example in EXAMPLES:
            (Path(folder) / "config.json").write_text(json.dumps(example.shape))
            parts.append(section(example, folder))
    return "\n".join(parts)


def section(example: Example, folder: str) -> str:
    values = {**COMMON, **example.values, f"{M}.path": folder}
    by_path = {tuple(key.split(".")): value for key, value in values.items()}
    config = load_config(
        nested(by_path), PPOConfig, overrides=[f"{key}=" for key in values]
    ).checked()
    plan, where = memory_plan(config), placement(config)
    assert plan.shape is not None, plan.reason
    assert plan.sync is not None
    lines = [f"## {example.title}", "", f"{billions(plan.shape.params)} parameters.", ""]
    lines += ["```", *(f"{key}={value}" for key, value in example.values.items()), "```", ""]
    lines += ["| role | placement |", "|---|---|"]
    lines += [f"| {role.role} | {role.pool}: {role.layout} |" for role in where.roles]
    lines += ["", "| phase | GiB | made of |", "|---|---|---|"]
    for phase in plan.phases:
        made = ", ".join(f"{name} {gib(size)}" for name, size in phase.parts.items() if size)
        lines.append(f"| {phase.name} | {gib(phase.total)} | {made} |")
    size, seconds = gib(plan.sync.num_bytes), plan.sync.seconds
    lines += ["", f"Weight update: {plan.sync.how}, {size} GiB, about {seconds:.0f} s."]
    lines += ["", example.remark, ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is not up to date")
    text = page()
    if parser.parse_args().check:
        sys.exit(0 if PAGE.read_text() == text else f"{PAGE} is out of date: run {__file__}")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
