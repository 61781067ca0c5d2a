"""From a configuration to the output file.

    prompts checked -> identity -> batches of an earlier run -> engines -> batches -> output file

Rows of a few batches are in flight on the fleet at the same time; a batch is saved when all of its
rows have ended. Each response has a seed made of `data.seed`, its row and its number, so it does
not matter which engine generates it, together with what, or in which run.

The prompts of a parquet file, checked before the first is answered.

A row whose prompt cannot be sent (null, longer than `rollout.prompt_length`, refused by the chat
template) is named with its number and gets no responses; too many of them end the run before it
begins (`verl.utils.dataset.quarantine`).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from verl.config.data import DataConfig
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
from verl.utils.dataset.media import media_fault, with_media
from verl.utils.dataset.prompt_encoder import PromptEncoder
from verl.utils.dataset.prompts import (
    Prompt,
    PromptTooLong,
    as_prompt,
    has_media,
    set_chat_template,
)
from verl.utils.dataset.quarantine import prompt_fault, sound_rows
from verl.utils.dataset.tables import DataError, ParquetFile, open_table
from verl.utils.environment import EndsTheRun
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_external_libs
from verl.utils.media import Media
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


class PromptFile:
    """Rows count from 0. `path` is the local file, a copy where `data.path` is a remote one."""

    def __init__(
        self, config: GenerationConfig, tokenizer: PreTrainedTokenizerBase, processor: Any = None
    ) -> None:
        options, max_tokens = config.data, config.rollout.prompt_length
        self._image_key = options.image_key
        set_chat_template(tokenizer, options.chat_template)
        self._tokenizer, self._key, self._max_tokens = tokenizer, options.prompt_key, max_tokens
        encoding = DataConfig(
            max_prompt_length=max_tokens,
            apply_chat_template_kwargs=options.apply_chat_template_kwargs,
            mm_processor_kwargs=options.mm_processor_kwargs,
        )
        self._encoder = PromptEncoder(tokenizer, processor, encoding)
        self._table = open_table(options.path)
        (file,) = self._table.files
        if not isinstance(file, ParquetFile):
            raise DataError(f"data.path is {options.path}; it must be a .parquet file")
        self.path = file.path
        self.num_rows = len(self._table)
        self._check_column()
        sound = sound_rows(self._table, self._fault, columns={self._key, self._image_key})
        self._sound = frozenset(sound.numbers.tolist())

    @property
    def num_sound(self) -> int:
        return len(self._sound)

    def has_prompt(self, row: int) -> bool:
        """Whether the row can be answered."""
        return row in self._sound

    def encoded(self, row: int) -> tuple[list[int], tuple[Media, ...]]:
        """The token ids that the model continues, and the images among them."""
        prompt = self._prompt(self._table[row])
        if has_media(prompt):
            return self._encoder.with_images(prompt)
        return self._encoder.ids(prompt), ()

    def _prompt(self, row: Mapping[str, Any]) -> Prompt:
        prompt = as_prompt(row[self._key], self._tokenizer)
        images = row.get(self._image_key) or ()
        if not images:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return with_media(messages, images, ())

    def _fault(self, row: Mapping[str, Any]) -> str | None:
        """Why a row gets no responses."""
        fault = prompt_fault(row[self._key])
        if fault is not None:
            return f"{self._key} {fault}"
        fault = media_fault(row[self._key], row.get(self._image_key) or (), ())
        if fault is not None:
            return fault
        prompt = self._prompt(row)
        if not isinstance(prompt, str) and self._tokenizer.chat_template is None:
            return (
                f"{self._key} is a list of messages, but the tokenizer has no chat template; set "
                "data.chat_template=chatml (or a Jinja template), or write prompts as text"
            )
        found = self._encoder.fault(prompt)
        if isinstance(found, PromptTooLong):
            return (
                f"{self._key} has more than {self._max_tokens} tokens; raise rollout.prompt_length"
            )
        if isinstance(found, DataError):
            return str(found)
        return None if found is None else f"{self._key} is refused by the chat template: {found}"

    def _check_column(self) -> None:
        columns = pq.read_schema(self.path).names
        if self._key not in columns:
            close = get_close_matches(self._key, columns, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise DataError(
                f"{self.path} has no column {self._key!r} (data.prompt_key); {hint}"
                f"it has: {', '.join(columns)}"
            )


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
        # At once, not at the end of a turn: the event loop of a notebook waits for this thread.
        with ExitStack() as together:
            for engine in fleet.engines:
                together.enter_context(engine.together())
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
