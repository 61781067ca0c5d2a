"""A small model that can play textarena's "guess the number", and the games it will play.

    python examples/textarena/prepare.py --out runs/textarena --seed 0 [--sham]

The game: a number from 1 to 16, six guesses in brackets, and textarena says "higher" or "lower".
Halving what is left finds every number within five guesses, 3.38 on average.

    model/           a Llama with random weights; its tokenizer is trained on the words of the game
    sft.parquet      games as conversations: one in three halves, the others guess at random
    train.parquet    games for reinforcement learning: the environment and a seed
    test.parquet     other seeds
"""

import argparse
import asyncio
import random
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from verl.environments.base import Action, make_environment
from verl.environments.make_data import make_rows
from verl.environments.pool import EnvironmentSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_agent"))

from tiny_game import TURNS_TEMPLATE, build_tokenizer, save_model

LOW, HIGH, MAX_GUESSES = 1, 16, 6
SPEC = EnvironmentSpec(
    name="textarena:GuessTheNumber-v0",
    kwargs={"min_number": LOW, "max_number": HIGH, "max_turns": MAX_GUESSES},
)
NUM_SHOWN, NUM_TRAIN, NUM_TEST = 6000, 2048, 128
FIRST_TRAIN, FIRST_TEST = 1_000_000, 2_000_000
"""Seeds of the games that are played, apart from those that are shown."""

SHARE_HALVING = 0.35


def play(seed: int, is_halving: bool, rng: random.Random) -> list[dict[str, str]]:
    """A game against textarena itself, as a conversation."""
    game = make_environment(SPEC.name, SPEC.kwargs)
    observation = game.reset({}, seed)
    messages: list[dict[str, str]] = []
    low, high, left = LOW, HIGH, list(range(LOW, HIGH + 1))
    while True:
        messages.append({"role": "user", "content": observation.text})
        guess = (low + high) // 2 if is_halving else rng.choice(left)
        left.remove(guess)
        messages.append({"role": "assistant", "content": f"[{guess}]"})
        observation = game.step(Action(f"[{guess}]"))
        if observation.done:
            return messages
        low, high = (guess + 1, high) if "higher" in observation.text else (low, guess - 1)


def prepare(folder: Path, seed: int, *, is_sham: bool = False) -> str:
    """Write everything; in the games of a sham, what the environment says is drawn at random."""
    rng = random.Random(seed)
    games = [play(n, rng.random() < SHARE_HALVING, rng) for n in range(NUM_SHOWN)]
    texts = (
        f"{message['role']}\n{message['content']}" for game in games[:1000] for message in game
    )
    tokenizer = build_tokenizer(texts, vocabulary=1024, chat_template=TURNS_TEMPLATE)
    size = save_model(folder / "model", tokenizer, seed)
    spec = replace(SPEC, name=f"{Path(__file__).parent.resolve() / 'sham.py'}:Sham")
    spec = spec if is_sham else SPEC
    rows = [{"messages": game} for game in games]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "sft.parquet")
    for split, first, num in (("train", FIRST_TRAIN, NUM_TRAIN), ("test", FIRST_TEST, NUM_TEST)):
        rows = asyncio.run(make_rows(spec, range(first, first + num)))
        named = [{**row, "data_source": "guess_number"} for row in rows]
        parquet.write_table(pa.Table.from_pylist(named), folder / f"{split}.parquet")
    longest = max(len(tokenizer.apply_chat_template(game)["input_ids"]) for game in games)
    return f"{size:,} parameters; the longest game has {longest} tokens"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prepare the model and the games.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sham", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(f"{arguments.out}: {prepare(arguments.out, arguments.seed, is_sham=arguments.sham)}")
