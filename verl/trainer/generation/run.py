"""From a configuration to the output file.

    prompts checked -> identity -> parts of an earlier run -> engines -> batches -> output file

Each response has a seed made of `data.seed`, its row and its number, so it does not matter which
engine generates it, together with what, or in which run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from verl.config.generation import GenerationConfig
from verl.trainer.generation.identity import identity_of
from verl.trainer.generation.output import is_done, write_output
from verl.trainer.generation.parts import NO_ANSWERS, Answers, Parts
from verl.trainer.generation.prompts import PromptFile
from verl.trainer.generation.report import Start, Summary
from verl.trainer.generation.sharing import Batch, Engine, GenerationFailed, share
from verl.trainer.ppo.seeds import keyed_seed
from verl.utils.environment import EndsTheRun
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_external_libs
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import GenerationRequest, Rollout, SamplingParams, TokenOutput
from verl.workers.rollout.sequences import sampling_options


class Stopped(EndsTheRun, RuntimeError):
    """Somebody pressed Ctrl-C."""

    exit_code = 130


StartEngines = Callable[[str, int], Sequence[Engine]]
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
    prompts = PromptFile(config, tokenizer)
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

    def generate(self, engines: Sequence[Engine]) -> int:
        """All batches that are missing; how often an engine had to be started again."""
        total, kept = self.prompts.num_rows, self.num_rows_kept
        try:
            with tqdm(total=total, initial=kept, unit=" rows", disable=None) as bar:

                def work(rollout: Rollout, batch: Batch) -> None:
                    self.parts.save(batch.number, self._answers(rollout, batch))
                    bar.update(len(batch.rows))

                return share(self.pending, engines, work)
        except KeyboardInterrupt:
            raise Stopped(f"stopped; {self._what_is_kept()}") from None
        except GenerationFailed as error:
            raise GenerationFailed(f"{error}; {self._what_is_kept()}") from error
        finally:
            for engine in engines:
                engine.close()

    def _what_is_kept(self) -> str:
        return f"finished batches are in {self.parts.folder}, and the same command goes on there"

    def responses(self, summary: Summary) -> Iterator[list[str]]:
        """The responses to every row, in order; `summary` counts them."""
        for batch in self.batches:
            table: pa.Table = self.parts.read(batch.number)
            summary.add(table)
            yield from table["responses"].to_pylist()

    def _answers(self, rollout: Rollout, batch: Batch) -> list[Answers]:
        rows = [row for row in batch.rows if self.prompts.has_prompt(row)]
        outputs = rollout.generate_batch([self._request(row) for row in rows])
        found = dict(zip(rows, map(self._as_answers, outputs), strict=True))
        return [found.get(row, NO_ANSWERS) for row in batch.rows]

    def _request(self, row: int) -> GenerationRequest:
        options = self.config.data
        return GenerationRequest(
            request_id=f"row {row + 1}",
            prompt_ids=self.prompts.ids(row),
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
