"""From a configuration to the output file.

    prompts checked -> identity -> batches of an earlier run -> engines -> batches -> output file

Rows of a few batches are in flight on the fleet at the same time; a batch is saved when all of its
rows have ended. Each response has a seed made of `data.seed`, its row and its number, so it does
not matter which engine generates it, together with what, or in which run.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import pyarrow as pa
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from verl.config.generation import GenerationConfig
from verl.trainer.generation.engines import Engines, GenerationFailed
from verl.trainer.generation.output import (
    NO_ANSWERS,
    Answers,
    Parts,
    identity_of,
    is_done,
    write_output,
)
from verl.trainer.generation.plan import Start, Summary
from verl.trainer.generation.prompts import PromptFile
from verl.utils.environment import EndsTheRun
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_external_libs
from verl.utils.scramble import keyed_seed
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.workers.rollout.base import (
    EngineLostError,
    GenerationRequest,
    SamplingParams,
    TokenOutput,
)
from verl.workers.rollout.fleet import Fleet
from verl.workers.rollout.sequences import sampling_options

MAX_ATTEMPTS = 3
WAKE_SECONDS = 0.5


class Stopped(EndsTheRun, RuntimeError):
    """Somebody pressed Ctrl-C."""

    exit_code = 130


StartEngines = Callable[[str, int], Engines]
"""From the local path of the model and the number of batches to engines that run."""


def generate(
    config: GenerationConfig,
    start: StartEngines,
    announce: Callable[[Start], None] = lambda start: None,
) -> Summary:
    """Answer the prompts of `data.path`; `announce` hears what is about to be done."""
    import_external_libs(config.model.external_lib)
    model_path = copy_to_local(local_path(config.model.path))
    tokenizer = hf_tokenizer(model_path, trust_remote_code=config.model.trust_remote_code)
    processor = hf_processor(model_path, trust_remote_code=config.model.trust_remote_code)
    prompts = PromptFile(config, tokenizer, processor)
    output = Path(config.data.output_path).expanduser()
    identity = identity_of(config, prompts.path, num_rows=prompts.num_rows, model_path=model_path)
    if is_done(output, identity, overwrite=config.data.overwrite):
        return Summary.of_earlier_run(output)
    parts = Parts(output, identity, overwrite=config.data.overwrite)
    try:
        run = Run(config, prompts, tokenizer, parts)
        announce(Start(prompts.num_rows, prompts.num_sound, run.num_rows_kept, parts.folder))
        summary = Summary(output)
        if run.pending:
            summary.num_restarts = run.generate(start(model_path, len(run.pending)))
        write_output(prompts.path, output, run.responses(summary), identity)
        parts.remove()
    finally:
        parts.close()
    return summary.ended()


@dataclass(frozen=True)
class Batch:
    """Rows `first` to `last`, counted from 0, both included."""

    number: int
    first: int
    last: int

    @property
    def rows(self) -> range:
        return range(self.first, self.last + 1)

    def __str__(self) -> str:
        return f"batch {self.number} (rows {self.first + 1} to {self.last + 1})"


class RunningBatch:
    """A batch in flight; it enters `ended` when all rows have ended, or one has failed."""

    def __init__(
        self,
        batch: Batch,
        requests: Mapping[int, GenerationRequest],
        fleet: Fleet,
        ended: "SimpleQueue[RunningBatch]",
    ) -> None:
        self.batch = batch
        self._ended = ended
        self._lock = threading.Lock()
        self._num_running = len(requests)
        self._futures = {row: fleet.submit(request) for row, request in requests.items()}
        for future in self._futures.values():
            future.add_done_callback(self._end)
        if not requests:
            ended.put(self)

    def outputs(self) -> dict[int, list[TokenOutput]]:
        """The samples of each row."""
        try:
            done = {row: future for row, future in self._futures.items() if future.done()}
            return {row: future.result(timeout=0) for row, future in done.items()}
        except EngineLostError as error:
            raise GenerationFailed(f"{self.batch} is not generated: {error}") from error
        except ValueError as error:
            raise GenerationFailed(f"{self.batch} is refused by the engine: {error}") from error

    def cancel(self) -> None:
        for future in self._futures.values():
            future.cancel()

    def _end(self, future: "Future[list[TokenOutput]]") -> None:
        if future.cancelled():
            return
        with self._lock:
            self._num_running -= 1
            is_last = self._num_running == 0
        if is_last or future.exception(timeout=0) is not None:
            self._ended.put(self)


@dataclass
class Run:
    """The batches of one run, some of which an earlier run may have finished."""

    config: GenerationConfig
    prompts: PromptFile
    tokenizer: PreTrainedTokenizerBase
    parts: Parts

    def __post_init__(self) -> None:
        num_rows, size = self.prompts.num_rows, self.config.data.batch_size
        self.batches = [
            Batch(number, first, min(first + size, num_rows) - 1)
            for number, first in enumerate(range(0, num_rows, size))
        ]
        finished = self.parts.finished([len(batch.rows) for batch in self.batches])
        self.pending = [batch for batch in self.batches if batch.number not in finished]
        self.params = SamplingParams(
            max_tokens=self.config.rollout.response_length,
            **sampling_options(self.config.rollout, {}),
        )

    @property
    def num_rows_kept(self) -> int:
        """Rows that need not be generated, because they are there."""
        return self.prompts.num_rows - sum(len(batch.rows) for batch in self.pending)

    def generate(self, engines: Engines) -> int:
        """Generate all batches that are missing; returns how many engines were restarted."""
        fleet = Fleet(engines.rollouts, recover=engines.restart, max_attempts=MAX_ATTEMPTS)
        total, kept = self.prompts.num_rows, self.num_rows_kept
        try:
            with tqdm(total=total, initial=kept, unit=" rows", disable=None) as bar:
                self._generate(fleet, bar.update)
        except KeyboardInterrupt:
            raise Stopped(f"stopped; {self._what_is_kept()}") from None
        except GenerationFailed as error:
            raise GenerationFailed(f"{error}; {self._what_is_kept()}") from error
        finally:
            fleet.close()
            engines.close()
        return fleet.num_restarts

    def _generate(self, fleet: Fleet, report: Callable[[int], object]) -> None:
        """Keep one batch more than there are engines in flight, and save those that end."""
        waiting = deque(self.pending)
        in_flight: dict[int, RunningBatch] = {}
        ended: SimpleQueue[RunningBatch] = SimpleQueue()
        try:
            while waiting or in_flight:
                while waiting and len(in_flight) <= len(fleet.engines):
                    batch = waiting.popleft()
                    rows = [row for row in batch.rows if self.prompts.has_prompt(row)]
                    requests = {row: self._request(row) for row in rows}
                    in_flight[batch.number] = RunningBatch(batch, requests, fleet, ended)
                try:
                    running = ended.get(timeout=WAKE_SECONDS)
                except Empty:
                    continue
                outputs = running.outputs()
                answers = {row: self._as_answers(samples) for row, samples in outputs.items()}
                batch = running.batch
                self.parts.save(batch.number, [answers.get(r, NO_ANSWERS) for r in batch.rows])
                report(len(batch.rows))
                del in_flight[batch.number]
        finally:
            for running in in_flight.values():
                running.cancel()

    def _what_is_kept(self) -> str:
        return f"finished batches are in {self.parts.folder}, and the same command goes on there"

    def responses(self, summary: Summary) -> Iterator[list[str]]:
        """The responses to every row, in order; `summary` counts them."""
        for batch in self.batches:
            table: pa.Table = self.parts.read(batch.number)
            summary.add(table)
            yield from table["responses"].to_pylist()

    def _request(self, row: int) -> GenerationRequest:
        options = self.config.data
        prompt_ids, media = self.prompts.encoded(row)
        return GenerationRequest(
            request_id=f"row {row + 1}",
            prompt_ids=prompt_ids,
            media=media,
            params=self.params,
            num_samples=options.n_samples,
            seeds=tuple(keyed_seed(options.seed, row, n) for n in range(options.n_samples)),
        )

    def _as_answers(self, samples: Sequence[TokenOutput]) -> Answers:
        texts = (
            self.tokenizer.decode(sample.token_ids, skip_special_tokens=True) for sample in samples
        )
        return Answers(
            responses=[str(text) for text in texts],
            num_tokens=[len(sample.token_ids) for sample in samples],
            stop_reasons=[sample.stop_reason for sample in samples],
        )


def local_path(path: str) -> str:
    """Paths may begin with `~`; names on a hub do not."""
    return str(Path(path).expanduser()) if path.startswith("~") else path
