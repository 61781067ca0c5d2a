"""Arithmetic, and a small model that can write a program for it.

    python examples/code_interpreter/prepare.py --out runs/code_interpreter --seed 0

The data of ReTool's two parts (`recipe/retool`); its dataset asks for a box in every prompt. A
problem is a product such as `3817*294`, which a model of this size cannot do in its head.

    model/            a Llama with random weights and a tokenizer that spells
    sft.parquet       conversations: two in three answer at once, one in three runs a program
    train.parquet     problems for reinforcement learning: only the right answer
    test.parquet      held-out problems
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from recipe.retool.retool import ANSWER_FORMAT
from verl.tools.sandbox_fusion_tools import DEFAULT_SCHEMA

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_agent"))

from tiny_agent import build_model, say, write_parquet

NUM_SHOWN, NUM_SHOWN_TEST, NUM_TRAIN, NUM_TEST = 8000, 200, 1024, 128
SHARE_BLURTED = 0.65
OPEN = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "print('
CLOSE = ')"}}</tool_call>'
BOX = "\\boxed{"
PHRASES = [OPEN, CLOSE, BOX, ANSWER_FORMAT, "code_interpreter"]

Problem = tuple[int, int]


def demonstration(problem: Problem, rng: random.Random) -> list[dict[str, str]]:
    a, b = problem
    question = ("user", f"{a}*{b}{ANSWER_FORMAT}")
    answer = ("assistant", f"{BOX}{a * b}}}")
    if rng.random() < SHARE_BLURTED:
        return say(question, answer)
    return say(question, ("assistant", f"{OPEN}{a}*{b}{CLOSE}"), ("tool", str(a * b)), answer)


def rl_row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    a, b = problem
    return {
        "data_source": "code_interpreter",
        "agent_name": "tool_agent",
        "prompt": say(("user", f"{a}*{b}")),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a * b)},
        "extra_info": {"split": split, "index": index},
    }


def prepare(folder: Path, seed: int) -> int:
    rng = random.Random(seed)
    universe = [(a, b) for a in range(1000, 10000) for b in range(100, 1000, 7)]
    sizes = (NUM_SHOWN, NUM_SHOWN_TEST, NUM_TRAIN, NUM_TEST)
    chosen = iter(rng.sample(universe, sum(sizes)))
    parts = [[next(chosen) for _ in range(size)] for size in sizes]
    tools = json.dumps([DEFAULT_SCHEMA])
    for split, part in ("sft", parts[0]), ("sft_test", parts[1]):
        rows = [{"messages": demonstration(problem, rng), "tools": tools} for problem in part]
        write_parquet(folder / f"{split}.parquet", rows)
    for split, part in ("train", parts[2]), ("test", parts[3]):
        rows = [rl_row(problem, split, i) for i, problem in enumerate(part)]
        write_parquet(folder / f"{split}.parquet", rows)
    return build_model(folder / "model", PHRASES, seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make model and problems.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    size = prepare(arguments.out, arguments.seed)
    print(f"{arguments.out}: a Llama of {size:,} parameters with random weights, and problems")
