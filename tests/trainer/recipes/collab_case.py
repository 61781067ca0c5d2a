"""CollabLLM on the toy: the sevens that a model says in conversations with a user."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F

from tests.tiny_models import plain_twin, tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from tests.toy import ACTOR, ROLLOUT, recipe_run
from verl.interactions.base import BaseInteraction

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
METRIC = """
import zlib


def sevens(messages, **about):
    said = [message["content"].replace(" ", "") for message in messages[1::2]]
    return sum(text.count("7") / max(len(text), 1) for text in said) / 2


def noise(messages, **about):
    return zlib.crc32(repr(messages).encode()) % 9 / 8
"""
COMMON = (
    "data.train_batch_size=8",
    "data.max_response_length=24",
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ROLLOUT}.n=8",
    f"{ROLLOUT}.multi_turn.num_repeat_rollouts=2",
    f"{ROLLOUT}.multi_turn.max_user_turns=1",
    "trainer.total_training_steps=20",
)


class Echo(BaseInteraction):
    """Answers once, then has what it wants."""

    async def generate_response(self, instance_id, messages, **kwargs):
        num_said = sum(message["role"] == "user" for message in messages)
        return num_said > 2, "ok", None, {}


def make_talker(folder: Path) -> Path:
    """The toy's model after some steps on answers of random letters that come to an end."""
    model, tokenizer = plain_twin(tiny_model("llama")), tiny_tokenizer()
    draw = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        ids = torch.randint(3, model.config.vocab_size, (32, 16), generator=draw)
        is_end = torch.rand(ids.shape, generator=draw) < 0.2
        ids[is_end] = tokenizer.eos_token_id
        logits = model(input_ids=ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def collab_settings(toy: Path, folder: Path) -> list[str]:
    """Files of a run with the simulated user, and the settings that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    users = folder / "users.yaml"
    class_name = f"{Echo.__module__}.{Echo.__qualname__}"
    users.write_text(json.dumps({"interaction": [{"name": "echo", "class_name": class_name}]}))
    rows = [json.loads(line) for line in (toy / "train.jsonl").read_text().splitlines()]
    for row in rows:
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        row["extra_info"]["interaction_kwargs"] = {"name": "echo"}
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "metrics.py").write_text(METRIC)
    return [
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"actor_rollout_ref.model.path={make_talker(folder / 'model')}",
        f"data.chat_template={json.dumps(TEMPLATE)}",
        f"{ROLLOUT}.multi_turn.interaction_config_path={users}",
    ]


def learn_collab(toy: Path, output: Path, *changes: str, graded_by: str = "sevens") -> list[float]:
    """The share of sevens in the conversations of every step; `noise` grades by something else."""
    weights = {name: float(name == graded_by) for name in ("sevens", "noise")}
    metrics, _ = recipe_run(
        toy,
        output,
        "collabllm",
        *collab_settings(toy, output),
        *COMMON,
        f"reward_model.reward_kwargs.metric_weights={json.dumps(weights)}",
        *(f"reward_model.reward_kwargs.metrics.{m}={output}/metrics.py:{m}" for m in weights),
        *changes,
    )
    return [step["reward/sevens/mean"] for step in metrics]
