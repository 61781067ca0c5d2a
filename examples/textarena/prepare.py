"""A small model that can play textarena's "guess the number", and the games it will play.

    python examples/textarena/prepare.py --out runs/textarena --seed 0

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
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from verl.environments.base import Action, make_environment
from verl.environments.make_data import make_rows
from verl.environments.pool import EnvironmentSpec
from verl.models.loading import random_causal_lm

LOW, HIGH, MAX_GUESSES = 1, 16, 6
SPEC = EnvironmentSpec(
    name="textarena:GuessTheNumber-v0",
    kwargs={"min_number": LOW, "max_number": HIGH, "max_turns": MAX_GUESSES},
)
NUM_SHOWN, NUM_TRAIN, NUM_TEST = 6000, 2048, 128
FIRST_TRAIN, FIRST_TEST = 1_000_000, 2_000_000
"""Seeds of the games that are played, apart from those that are shown."""

SHARE_HALVING = 0.35
PAD, START, END = SPECIAL_TOKENS = ["<pad>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


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


def build_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Bytes, and the pieces of which conversations consist; a number is one token.

    Roles and numbers are pieces of their own, so that what the template writes before a turn and
    what the model writes in it never share a token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"^[a-z]+\n|\d+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def build_config(vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.12,  # about 1/sqrt(hidden size)
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(END),
        tie_word_embeddings=True,
    )


def prepare(folder: Path, seed: int) -> str:
    rng = random.Random(seed)
    games = [play(n, rng.random() < SHARE_HALVING, rng) for n in range(NUM_SHOWN)]
    tokenizer = build_tokenizer(
        f"{message['role']}\n{message['content']}" for game in games[:1000] for message in game
    )
    model = random_causal_lm(build_config(len(tokenizer)), seed=seed)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"messages": game} for game in games]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "sft.parquet")
    for split, first, num in (("train", FIRST_TRAIN, NUM_TRAIN), ("test", FIRST_TEST, NUM_TEST)):
        rows = asyncio.run(make_rows(SPEC, range(first, first + num)))
        named = [{**row, "data_source": "guess_number"} for row in rows]
        parquet.write_table(pa.Table.from_pylist(named), folder / f"{split}.parquet")
    longest = max(len(tokenizer.apply_chat_template(game)["input_ids"]) for game in games)
    size = sum(parameter.numel() for parameter in model.parameters())
    return f"{size:,} parameters; the longest game has {longest} tokens"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prepare the model and the games.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(f"{arguments.out}: {prepare(arguments.out, arguments.seed)}")
