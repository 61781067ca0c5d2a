"""The rows of a file, sent to a server over HTTP; the file comes back with their responses.

Prompts travel as token ids, so the server sees what training would see. Each row has a seed of its
own: the same file, model and options give the same responses, however many rows are under way.
"""

import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from verl.config.ppo import PPOConfig
from verl.server import RunningServer
from verl.trainer.generation.output import publish
from verl.utils.dataset.prompt_encoder import PromptEncoder
from verl.utils.dataset.prompts import as_prompt
from verl.utils.dataset.tables import DataError, open_table
from verl.utils.environment import WentWrong

COLUMN = "responses"
MAX_UNDER_WAY = 64
TRY_AGAIN = (429, 502, 503)


class RowFailed(WentWrong, RuntimeError):
    """A row got no responses, though it was sent again and again."""


class Stopped(WentWrong, RuntimeError):
    """The program was told to end before all rows were answered."""


def prompt_ids(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The ids of every row's prompt; the first row that has none is named."""
    encoder = PromptEncoder(tokenizer, None, config.data)
    table = open_table(config.data.train_files, cache_dir=config.data.cache_dir)
    if not len(table):
        raise DataError(f"data.train_files ({config.data.train_files}) has no rows")
    found = []
    for number in range(len(table)):
        row = table[number]
        if row.get(config.data.prompt_key) is None:
            location, key = table.location(number), config.data.prompt_key
            raise DataError(f"{location} has no prompt in the column {key!r} (data.prompt_key)")
        prompt = as_prompt(row[config.data.prompt_key], tokenizer)
        fault = encoder.fault(prompt) if config.data.truncation == "error" else None
        if fault is not None:
            raise DataError(f"{table.location(number)}: {fault}") from fault
        found.append(encoder.ids(prompt))
    return found


class RowClient:
    """Sends one row after another, from several threads."""

    def __init__(
        self, server: RunningServer, config: PPOConfig, asked_to_end: threading.Event
    ) -> None:
        self._server = server
        self._rollout = config.actor_rollout_ref.rollout
        self._first_seed = config.data.seed or 0
        self._asked_to_end = asked_to_end

    def answer(self, row: int, prompt: Sequence[int]) -> list[str]:
        """The responses to one row."""
        options = self._rollout.server
        body = json.dumps(self._body(row, prompt)).encode()
        trouble = ""
        for _ in range(options.max_attempts):
            if self._asked_to_end.is_set():
                raise Stopped("told to end; no file has been written")
            try:
                status, answer = self._post(body)
            except (OSError, http.client.HTTPException) as error:
                status, answer, trouble = 0, {}, repr(error)
            if status == 200:
                return [choice["text"] for choice in answer["choices"]]
            if status:
                trouble = answer["error"]["message"]
                if status not in TRY_AGAIN:
                    break
            self._asked_to_end.wait(options.retry_delay)
        raise RowFailed(
            f"row {row} got no response: {trouble}; rollout.server.timeout ({options.timeout:g} "
            f"seconds) and rollout.server.max_attempts ({options.max_attempts}) say how patient "
            "the program is"
        )

    def _post(self, body: bytes) -> tuple[int, Any]:
        options = self._server.service.options
        connection = http.client.HTTPConnection(
            options.host, self._server.port, timeout=self._rollout.server.timeout
        )
        headers = {
            "Authorization": f"Bearer {self._server.token}",
            "Content-Type": "application/json",
        }
        try:
            connection.request("POST", "/v1/completions", body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def _body(self, row: int, prompt: Sequence[int]) -> dict[str, Any]:
        rollout = self._rollout
        return {
            "model": self._server.service.options.model,
            "prompt": list(prompt),
            "n": rollout.n,
            "max_tokens": rollout.response_length,
            "temperature": rollout.temperature if rollout.do_sample else 0.0,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "repetition_penalty": rollout.repetition_penalty,
            "ignore_eos": rollout.ignore_eos,
            "seed": self._first_seed + row,
        }


def answer_rows(client: RowClient, prompts: Sequence[Sequence[int]]) -> list[list[str]]:
    """The responses to all rows, in their order; the first row that fails ends it."""
    with ThreadPoolExecutor(min(MAX_UNDER_WAY, len(prompts))) as pool:
        answers = pool.map(client.answer, range(len(prompts)), prompts)
        return list(tqdm(answers, total=len(prompts), desc="prompts"))


def write(config: PPOConfig, output: Path, responses: Sequence[list[str]]) -> None:
    """All rows with their responses; the file appears when it is whole."""
    table = pa.concat_tables(list(source_tables(config)), promote_options="default")
    if COLUMN in table.column_names:
        table = table.drop_columns([COLUMN])
    table = table.append_column(COLUMN, pa.array(responses, type=pa.list_(pa.string())))
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial")
    try:
        pq.write_table(table, partial)
        publish(partial, output)
    finally:
        partial.unlink(missing_ok=True)


def source_tables(config: PPOConfig) -> Iterator[pa.Table]:
    data = config.data
    for file in open_table(data.train_files, cache_dir=data.cache_dir).files:
        yield pq.read_table(file.path)
