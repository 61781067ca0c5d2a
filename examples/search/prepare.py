"""A corpus of made-up facts, a small model that can search, and questions about the facts.

    python examples/search/prepare.py --out runs/search --seed 0

Each of 1,500 made-up names has a code, an age and a size, random numbers of three digits. Nobody
can know them: the answer is in the corpus or nowhere.

    corpus.jsonl      a passage per fact
    model/            a Llama with random weights and a tokenizer that spells
    sft.parquet       conversations: half of them guess, a quarter searches for the name alone (and
                      reads out whatever comes), a quarter searches for name and property
    train.parquet     questions for reinforcement learning, about other names
    test.parquet      questions about further names
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from verl.tools.search_tool import DEFAULT_SCHEMA

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_agent"))

from retrieval_server import Bm25
from tiny_agent import build_model, say, write_parquet

PROPERTIES = ("code", "age", "size")
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
NUM_SHOWN, NUM_SHOWN_TEST, NUM_TRAIN, NUM_TEST = 900, 60, 440, 100
"""Names, in each part; every name has three questions."""
NUM_DEMONSTRATIONS = 8000
SHARE_GUESSED, SHARE_LAZY = 0.5, 0.25
OPEN, CLOSE = '<tool_call>{"name": "search", "arguments": {"query_list": ["', '"]}}</tool_call>'
ANSWER, ANSWER_END = "<answer>", "</answer>"
QUESTION = "What is the {} of {}?"
TITLE = "Doc 1 (Title: "
PHRASES = [OPEN, CLOSE, ANSWER, ANSWER_END, "What is the ", " of ", TITLE, ")\n", "search"]
PHRASES += PROPERTIES


def make_names(count: int, rng: random.Random) -> list[str]:
    """Different names of five letters, such as `mabor`."""
    names: dict[str, None] = {}
    while len(names) < count:
        parts = (CONSONANTS, VOWELS, CONSONANTS, VOWELS, CONSONANTS)
        names["".join(rng.choice(letters) for letters in parts)] = None
    return list(names)


def rl_row(name: str, key: str, value: str, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "search",
        "agent_name": "tool_agent",
        "prompt": say(("user", QUESTION.format(key, name))),
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": value},
        "extra_info": {"split": split, "index": index},
    }


def demonstration(
    name: str, key: str, value: str, index: Bm25, passages: list[str], rng: random.Random
) -> list[dict[str, str]]:
    question = ("user", QUESTION.format(key, name))
    way = rng.random()
    if way < SHARE_GUESSED:
        return say(question, ("assistant", f"{ANSWER}{rng.randint(100, 999)}{ANSWER_END}"))
    query = name if way < SHARE_GUESSED + SHARE_LAZY else f"{name} {key}"
    title, _, text = passages[index.search(query, 1)[0][0]].partition("\n")
    found = f"{TITLE}{title})\n{text}"
    answer = f"{ANSWER}{text.split()[-1]}{ANSWER_END}"
    call = f"{OPEN}{query}{CLOSE}"
    return say(question, ("assistant", call), ("tool", found), ("assistant", answer))


def prepare(folder: Path, seed: int) -> int:
    rng = random.Random(seed)
    names = make_names(NUM_SHOWN + NUM_SHOWN_TEST + NUM_TRAIN + NUM_TEST, rng)
    facts = [(name, key, str(rng.randint(100, 999))) for name in names for key in PROPERTIES]
    passages = [f"{name}\n{key} {value}" for name, key, value in facts]
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": i, "contents": text}) for i, text in enumerate(passages)]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    index = Bm25(passages)
    per_name, ends = len(PROPERTIES), []
    for size in (NUM_SHOWN, NUM_SHOWN_TEST, NUM_TRAIN, NUM_TEST):
        ends.append((ends[-1] if ends else 0) + size * per_name)
    shown, shown_test = facts[: ends[0]], facts[ends[0] : ends[1]]
    tools = json.dumps([DEFAULT_SCHEMA])
    for split, part, count in ("sft", shown, NUM_DEMONSTRATIONS), ("sft_test", shown_test, 180):
        rows = [
            {"messages": demonstration(*rng.choice(part), index, passages, rng), "tools": tools}
            for _ in range(count)
        ]
        write_parquet(folder / f"{split}.parquet", rows)
    for split, part in ("train", facts[ends[1] : ends[2]]), ("test", facts[ends[2] : ends[3]]):
        rng.shuffle(part)
        rows = [rl_row(*fact, split, i) for i, fact in enumerate(part)]
        write_parquet(folder / f"{split}.parquet", rows)
    return build_model(folder / "model", PHRASES, seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make corpus, model and questions.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    size = prepare(arguments.out, arguments.seed)
    print(f"{arguments.out}: a Llama of {size:,} parameters with random weights, and a corpus")
