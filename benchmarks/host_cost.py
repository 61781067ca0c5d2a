"""What the host does around an engine's passes: agent loops, fleet, scheduling, building the batch.

    python benchmarks/host_cost.py            # 128 prompts x 8 samples, 256 + 512 tokens

Prefill and decode return constants at once; everything else is real. Two contestants do the same
rollout and alternate:

    bare   `NativeEngine.generate_batch`, then the text of every response
    loops  `AgentLoopManager.generate_sequences`: a single-turn loop per sample, one batch

Responses have equal lengths, or lengths that follow from their seeds. Times are CPU milliseconds of
the process, the 20th percentile of the runs: clocks tell little on a shared machine. The cost of a
row is the difference of the two by the number of rows.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from verl.agent_loop import AgentLoopManager
from verl.config.data import DataConfig
from verl.config.ppo import ActorRolloutRefConfig, PPOConfig
from verl.config.rollout import RolloutConfig
from verl.models.loading import random_causal_lm
from verl.protocol import DataProto
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.attention import PrefillSequence
from verl.workers.rollout.native.batch import Batch, RunningBatch, StepOutput
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine
from verl.workers.rollout.native.scheduler import Move
from verl.workers.rollout.native.sequence import Group, KnownTokens, Sample
from verl.workers.rollout.sequences import SEED_COLUMN

RESULTS = Path(__file__).parent / "results" / "host_cost.json"
VOCABULARY, EOS, TOKEN = 512, 2, 7
TOKENS_PER_STEP = 8


class ConstantBatch(Batch):
    """Gives every row the same token until its length is reached, and computes nothing."""

    def __init__(self, real: RunningBatch, length_of: Callable[[Sample], int]) -> None:
        self.cache, self.num_rows, self.budget = real.cache, real.num_rows, real.budget
        self._length_of = length_of

    def prefill(
        self, samples: Sequence[Sample], sequences: Sequence[PrefillSequence], num_groups: int
    ) -> list[StepOutput]:
        return [self._output(sample, 1) for sample in samples]

    def decode(self, samples: Sequence[Sample]) -> list[StepOutput]:
        return [self._output(sample, TOKENS_PER_STEP) for sample in samples]

    def move_rows(self, moves: Sequence[tuple[Move, Sample]]) -> None:
        pass

    def move_group(self, move: Move, group: Group) -> None:
        pass

    def keep(self, sample: Sample) -> KnownTokens:
        return KnownTokens(sample.token_ids[:-1], [])

    def reset(self) -> None:
        pass

    def _output(self, sample: Sample, num_tokens: int) -> StepOutput:
        num_left = self._length_of(sample) - sample.num_tokens
        tokens = [TOKEN] * min(num_tokens, num_left)
        is_done = num_left <= num_tokens
        if is_done:
            tokens[-1] = EOS
        return StepOutput(sample, tokens, [-1.0] * len(tokens), is_done)


class Rollouts:
    """The same rollout in two ways, on engines that compute nothing."""

    def __init__(self, options: argparse.Namespace, *, are_equal: bool) -> None:
        self.prompts, self.samples = options.prompts, options.samples
        self.prompt_tokens, self.new_tokens = options.prompt_tokens, options.new_tokens
        self._are_equal = are_equal
        self.tokenizer = build_tokenizer()
        rng = np.random.default_rng(0)
        ids = rng.integers(3, VOCABULARY, (self.prompts, self.prompt_tokens))
        self.ids: list[list[int]] = ids.tolist()
        self.engine = self._build_engine()
        self.manager = AgentLoopManager(
            self._config(), rollouts=[self._build_engine()], tokenizer=self.tokenizer
        )

    @property
    def num_rows(self) -> int:
        return self.prompts * self.samples

    def bare(self) -> int:
        seeds = itertools.count()
        requests = [
            GenerationRequest(
                request_id=str(number),
                prompt_ids=ids,
                params=SamplingParams(max_tokens=self.new_tokens),
                num_samples=self.samples,
                seeds=tuple(itertools.islice(seeds, self.samples)),
            )
            for number, ids in enumerate(self.ids)
        ]
        outputs = self.engine.generate_batch(requests)
        rows = [output.token_ids for samples in outputs for output in samples]
        self.tokenizer.batch_decode(rows)
        return sum(map(len, rows))

    def loops(self) -> int:
        texts = [" ".join(f"w{number}" for number in ids) for ids in self.ids]
        columns = {
            "raw_prompt": [text for text in texts for _ in range(self.samples)],
            SEED_COLUMN: np.arange(self.num_rows).astype(object),
        }
        batch = self.manager.generate_sequences(DataProto.from_dict(non_tensors=columns))
        return int(batch.batch["response_mask"].sum())

    def _build_engine(self) -> NativeEngine:
        shape = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16}
        shape |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
        limits = EngineLimits(
            max_num_seqs=self.num_rows,
            max_prompt_tokens=self.prompt_tokens,
            max_response_tokens=self.new_tokens,
            max_prefill_tokens=1 << 30,
            tokens_per_step=TOKENS_PER_STEP,
        )
        model = random_causal_lm(AutoConfig.for_model("llama", **shape))
        engine = NativeEngine(model, limits, eos_token_ids=[EOS])
        assert isinstance(engine.core.batch, RunningBatch), "host costs are measured on a CPU"
        engine.core.batch = ConstantBatch(engine.core.batch, self._length_of)
        return engine

    def _length_of(self, sample: Sample) -> int:
        shortest = self.new_tokens // 8
        if self._are_equal:
            return self.new_tokens
        return shortest + sample.seed % (self.new_tokens - shortest)

    def _config(self) -> PPOConfig:
        lengths = {"prompt_length": self.prompt_tokens, "response_length": self.new_tokens}
        rollout = RolloutConfig(max_num_seqs=self.num_rows, **lengths)
        data = DataConfig(max_prompt_length=self.prompt_tokens, max_response_length=self.new_tokens)
        return PPOConfig(data=data, actor_rollout_ref=ActorRolloutRefConfig(rollout=rollout))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One word per token."""
    words = {f"w{number}": number for number in range(3, VOCABULARY)}
    words |= {"<pad>": 0, "<unk>": 1, "</s>": EOS}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


def measure(rollouts: Rollouts, num_runs: int) -> dict[str, float]:
    """CPU milliseconds of each contestant, and the difference per row."""
    contestants = {"bare": rollouts.bare, "loops": rollouts.loops}
    num_tokens = {name: run() for name, run in contestants.items()}  # warm-up
    assert len(set(num_tokens.values())) == 1, f"both generate the same tokens: {num_tokens}"
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(num_runs):
        for name in list(contestants) if number % 2 else reversed(list(contestants)):
            start = time.process_time()
            contestants[name]()
            times[name].append(1000 * (time.process_time() - start))
    found = {name: percentile_20(values) for name, values in times.items()}
    return {**found, "per_row": (found["loops"] - found["bare"]) / rollouts.num_rows}


def percentile_20(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=5)[0] if len(values) > 1 else values[0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    table = Table("lengths", "bare, CPU ms", "loops, CPU ms", "ms per row over bare")
    report = {}
    for lengths, are_equal in (("equal", True), ("unequal", False)):
        found = report[lengths] = measure(Rollouts(options, are_equal=are_equal), options.runs)
        table.add_row(
            lengths, f"{found['bare']:.0f}", f"{found['loops']:.0f}", f"{found['per_row']:.3f}"
        )
    Console().print(table)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
