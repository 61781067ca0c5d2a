"""The work that every contestant does: prompts, how long to go on, and what a response is worth.

The usual size is 128 prompts of 256 random tokens, 8 samples each, 512 tokens per sample; lengths
are forced. A token is a word (`t17`), so text can be made of any ids, and the reward is a rule on
text that differs from sample to sample: with equal rewards every gradient would be zero.
"""

import argparse
import random
import string
from dataclasses import dataclass, fields

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu.shapes import SHAPES, VOCABULARY
from verl.workers.rollout.base import GenerationRequest, SamplingParams


@dataclass(frozen=True)
class Workload:
    """How many prompts and tokens."""

    prompts: int = 128
    samples: int = 8
    prompt_tokens: int = 256
    new_tokens: int = 512

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Workload":
        return cls(**{field.name: vars(options)[field.name] for field in fields(cls)})

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def generated_tokens(self) -> int:
        return self.sequences * self.new_tokens

    @property
    def tokens(self) -> int:
        """Prompts counted once per sample."""
        return self.sequences * (self.prompt_tokens + self.new_tokens)


def prompt_ids(work: Workload, vocabulary: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(10, vocabulary * 98 // 100) for _ in range(work.prompt_tokens)]
        for _ in range(work.prompts)
    ]


def prompt_texts(work: Workload, vocabulary: int, seed: int) -> list[str]:
    return [" ".join(f"t{token}" for token in ids) for ids in prompt_ids(work, vocabulary, seed)]


def requests(work: Workload, vocabulary: int, seed: int) -> list[GenerationRequest]:
    """Temperature 1; the end of a sequence is ignored."""
    params = SamplingParams(max_tokens=work.new_tokens, ignore_eos=True, seed=seed)
    return [
        GenerationRequest(
            request_id=str(number), prompt_ids=ids, params=params, num_samples=work.samples
        )
        for number, ids in enumerate(prompt_ids(work, vocabulary, seed))
    ]


def word_tokenizer(vocabulary: int) -> Tokenizer:
    """Token 17 is the word `t17`."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def hf_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """The same for transformers; two tokens that no prompt has pad and end."""
    return PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(vocabulary),
        eos_token=f"t{vocabulary - 1}",
        pad_token=f"t{vocabulary - 2}",
        unk_token="t0",
        padding_side="left",
    )


def reward(text: str) -> float:
    """The share of the text's digits that are even."""
    counts = [text.count(digit) for digit in string.digits]
    return sum(counts[::2]) / max(sum(counts), 1)


def workload_parser(description: str, **defaults: int) -> argparse.ArgumentParser:
    """The options of every part; `defaults` replaces those of the usual workload."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", default="0.5B", choices=SHAPES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, help="the JSON file to write")
    for field in fields(Workload):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=defaults.get(field.name, field.default))
    return parser


def vocabulary_of(shape: str) -> int:
    return int(SHAPES[shape].get("vocab_size", VOCABULARY))
