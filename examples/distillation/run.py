"""A teacher learns from rewards, then students learn from the teacher, without any.

    python examples/distillation/run.py --out runs/distillation

1. A tiny Llama learns with GRPO to write sevens: the reward is the share of sevens.
2. Fresh models of other random weights are distilled from it with `use_task_rewards=false`: each
   way of comparing, and as controls a learning rate of 0 and a teacher that never learnt.

Every command is printed before it runs. `curve.png` needs matplotlib.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from verl.models.loading import random_causal_lm

SPECIAL = ["<pad>", "<s>", "</s>"]
CHARACTERS = [chr(code) for code in range(33, 126)]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str.count(ground_truth) / 8
"""
MODES = ("k3", "forward_kl_topk", "reverse_kl_full")
LOSS = "distillation.distillation_loss"
TEACHER = "distillation.teacher_models.teacher_model"


def build(folder: Path, seed: int) -> Path:
    """A Llama of 25,000 random weights and a tokenizer with a token for each character."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    random_causal_lm(config, seed=seed).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def write_rows(path: Path) -> Path:
    rows = [
        {"prompt": f"{a}+{b}=", "data_source": "sevens", "answer": "7", "extra_info": {}}
        for a in range(8)
        for b in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(out: Path, name: str, model: Path, *changes: str, steps: int) -> list[dict[str, Any]]:
    """Run the command; the metrics of each step."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    command = [
        sys.executable, "-m", "verl.trainer.main_ppo",
        f"data.train_files={out / 'train.jsonl'}", "data.val_files=[]",
        "data.train_batch_size=8", "data.max_prompt_length=6", "data.max_response_length=8",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"{actor}.optim.lr=0.01", f"{actor}.optim.weight_decay=0.0",
        f"{actor}.ppo_mini_batch_size=8", f"{actor}.ppo_micro_batch_size_per_gpu=64",
        f"{rollout}.n=4", f"{rollout}.max_num_seqs=64",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={out / 'reward.py'}",
        f"trainer.total_training_steps={steps}", "trainer.n_gpus_per_node=1",
        "trainer.device=cpu", "trainer.logger=[file]", "trainer.val_before_train=false",
        f"trainer.save_freq={steps}", f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"{actor}.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        *changes,
    ]  # fmt: skip
    print(" ".join(command[1:]), flush=True)
    log = folder / "metrics.jsonl"
    log.unlink(missing_ok=True)
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(log)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=600)
    return [{"step": entry["step"], **entry["data"]} for entry in map(json.loads, log.open())]


def curve(steps: list[dict[str, Any]]) -> list[dict[str, float]]:
    names = {
        "score": "critic/score/mean",
        "divergence": "distillation/divergence",
        "seconds": "timing_s/step",
    }
    return [
        {"step": step["step"]}
        | {key: round(step[name], 5) for key, name in names.items() if name in step}
        for step in steps
    ]


def draw(results: dict[str, list[dict[str, float]]], path: Path) -> str:
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: pip install matplotlib"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for name, steps in results.items():
        style = ":" if name.startswith("control") else "-"
        axes.plot([s["step"] for s in steps], [s["score"] for s in steps], style, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("share of sevens in responses")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Distil a tiny student from a tiny teacher.")
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    options = parser.parse_args()
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out / "train.jsonl")
    (out / "reward.py").write_text(REWARD)
    start, fresh = build(out / "start", seed=0), build(out / "fresh", seed=1)
    steps = options.steps
    results = {"teacher, GRPO": curve(train(out, "teacher", start, steps=steps))}
    teacher = out / "teacher" / "checkpoints" / f"global_step_{steps}" / "actor" / "huggingface"

    def distil(name: str, path: Path, mode: str, *changes: str) -> list[dict[str, float]]:
        common = ["distillation.enabled=true", f"{LOSS}.use_task_rewards=false"]
        common += [f"{TEACHER}.model_path={path}", f"{LOSS}.loss_mode={mode}", *changes]
        return curve(train(out, name, fresh, *common, steps=steps))

    for mode in options.modes:
        results[f"student, {mode}"] = distil(mode, teacher, mode)
    frozen = "actor_rollout_ref.actor.optim.lr=0"
    results["control, lr 0"] = distil("frozen", teacher, "k3", frozen)
    results["control, untrained teacher"] = distil("untrained", start, "reverse_kl_full")
    (out / "curves.json").write_text(json.dumps(results, indent=1) + "\n")
    for name, found in results.items():
        print(f"{name:28} {found[0]['score']:.3f} -> {found[-1]['score']:.3f}")
    print(draw(results, out / "curve.png"))


if __name__ == "__main__":
    main()
