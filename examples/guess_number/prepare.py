"""A small model that can play "guess the number", and the games it will play.

    python examples/guess_number/prepare.py --out runs/guess_number --seed 0

The game: a number from 1 to 16, six guesses; the tool `guess(n)` answers `low`, `high` or `win`.
Halving what is left finds every number within five guesses, 3.38 on average.

    model/           a Llama with random weights; its tokenizer is trained on the words of the game
    sft.parquet      games as conversations: one in three halves, the others guess at random
    train.parquet    games for reinforcement learning: no moves, only the name of a game
    test.parquet     the sixteen numbers, each several times
    targets.json     what the server must find: the number of each game
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
from guess_tool import TOOL

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_agent"))

from tiny_game import TURNS_TEMPLATE, build_tokenizer, save_model

LOW, HIGH, MAX_GUESSES = 1, 16, 6
QUESTION = f"Find the number from {LOW} to {HIGH}."
FAREWELL = "Done."
NUM_SHOWN, NUM_TRAIN, NUM_TEST = 6000, 2048, 128
SHARE_HALVING = 0.35
CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\\n# Tools\\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}" + TURNS_TEMPLATE
)


def call_of(n: int) -> str:
    """A call as models of the Hermes and Qwen families write it."""
    return f'<tool_call>\n{{"name": "guess", "arguments": {{"n": {n}}}}}\n</tool_call>'


def answer_to(n: int, target: int) -> str:
    return "win" if n == target else "low" if n < target else "high"


def play(target: int, is_halving: bool, rng: random.Random) -> list[dict[str, str]]:
    """A game as a conversation."""
    messages = [{"role": "user", "content": QUESTION}]
    low, high = LOW, HIGH
    for _ in range(MAX_GUESSES):
        n = (low + high) // 2 if is_halving else rng.randint(LOW, HIGH)
        answer = answer_to(n, target)
        messages.append({"role": "assistant", "content": call_of(n)})
        messages.append({"role": "tool", "content": answer})
        if answer == "win":
            break
        low, high = (max(low, n + 1), high) if answer == "low" else (low, min(high, n - 1))
    messages.append({"role": "assistant", "content": FAREWELL})
    return messages


def rl_row(target: int, split: str, index: int) -> dict[str, Any]:
    """A row of verl's format; the tool learns the name of the game, the model nothing."""
    game = f"{split}-{index}"
    return {
        "data_source": "guess_number",
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": QUESTION}],
        "reward_model": {"style": "rule", "ground_truth": str(target)},
        "extra_info": {
            "index": index,
            "need_tools_kwargs": True,
            "tools_kwargs": {"guess": {"create_kwargs": {"game": game}}},
        },
    }


def prepare(folder: Path, seed: int) -> int:
    """Write everything; give the number of parameters."""
    rng = random.Random(seed)
    shown = [
        play(rng.randint(LOW, HIGH), rng.random() < SHARE_HALVING, rng) for _ in range(NUM_SHOWN)
    ]
    system = f"system\n# Tools\n{json.dumps(TOOL)}\n"
    texts = [system, *(f"{m['role']}\n{m['content']}" for game in shown[:500] for m in game)]
    tokenizer = build_tokenizer(
        iter([*texts, *[system] * 50]), vocabulary=768, chat_template=CHAT_TEMPLATE
    )
    size = save_model(folder / "model", tokenizer, seed)
    tools = json.dumps([TOOL])
    rows = {
        "sft": [{"messages": game, "tools": tools} for game in shown],
        "train": [rl_row(rng.randint(LOW, HIGH), "train", i) for i in range(NUM_TRAIN)],
        "test": [rl_row(LOW + i % (HIGH - LOW + 1), "test", i) for i in range(NUM_TEST)],
    }
    for name, table in rows.items():
        parquet.write_table(pa.Table.from_pylist(table), folder / f"{name}.parquet")
    targets = {
        row["extra_info"]["tools_kwargs"]["guess"]["create_kwargs"]["game"]: int(
            row["reward_model"]["ground_truth"]
        )
        for row in (*rows["train"], *rows["test"])
    }
    (folder / "targets.json").write_text(json.dumps(targets))
    return size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prepare guess the number.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    size = prepare(arguments.out, arguments.seed)
    print(f"{arguments.out}: a Llama of {size:,} parameters, and {NUM_TRAIN:,} games")
