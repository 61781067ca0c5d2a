"""The process that writes the store; `verl.board.process` starts it.

    setup    folder, facts, first_step, max_bytes; tokenizer: the JSON of the `tokenizers` package
    step     number, time, metrics, seconds, batch, events, validation: samples as they are stored
             rows: what each sample of the batch has, one list per field; with its arrays
    arrays   prompt_ids, response_ids, column.<name>: of all samples, one behind the other
             prompt_lengths, response_lengths: how many are of which

Texts are decoded here. Where `tokenizer` is None no other process knows how: the trainer sends them
(`rows` has prompt and response, and the step the texts of new tokens as `vocabulary`).

It ends when the socket has ended behind the last message; when the trainer has ended but something
that it left behind holds the socket, too. Neither torch nor transformers is imported.
"""

import json
import os
import select
import socket
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from verl.board.message import read_message
from verl.board.store import Sample, Step, StoreWriter

LOOK_SECONDS = 1.0
COLUMN = "column."


def main() -> None:
    with socket.socket(fileno=os.dup(0)) as line:
        try:
            write_all(line, trainer=int(sys.argv[1]))
        except (sqlite3.Error, OSError) as error:
            tell(line, f"{type(error).__name__}: {error}")


def write_all(line: socket.socket, trainer: int) -> None:
    descriptor = next_message(line, trainer)
    if descriptor is None:
        return
    setup, _ = read_message(descriptor)
    texts = Texts(setup["tokenizer"])
    store = StoreWriter(
        Path(setup["folder"]),
        facts=setup["facts"],
        decode=texts.of_token,
        max_bytes=setup["max_bytes"],
        first_step=setup["first_step"],
    )
    tell(line, None)
    while (descriptor := next_message(line, trainer)) is not None:
        store.add(step_of(*read_message(descriptor), texts))
        tell(line, None)
    store.close()


def next_message(line: socket.socket, trainer: int) -> int | None:
    """The descriptor of a message; None when there will be no other."""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    while not poll.poll(LOOK_SECONDS * 1000):
        if os.getppid() != trainer:
            return None
    _, descriptors, _, _ = socket.recv_fds(line, 16, 1)
    return descriptors[0] if descriptors else None


def tell(line: socket.socket, failure: str | None) -> None:
    """Reply to a message; a trainer that has ended hears nothing."""
    try:
        line.send(json.dumps({"failure": failure}).encode())
    except (BrokenPipeError, ConnectionResetError):
        return


class Texts:
    """What token ids say."""

    def __init__(self, tokenizer: str | None) -> None:
        self._backend = None if tokenizer is None else Tokenizer.from_str(tokenizer)
        self.vocabulary: dict[int, str] = {}
        """Of tokens that the trainer has decoded."""

    def of_token(self, token: int) -> str:
        if self._backend is None:
            return self.vocabulary[token]
        return self._backend.decode([token], skip_special_tokens=False)

    def of_rows(self, ids: list[np.ndarray]) -> list[str]:
        assert self._backend is not None
        return self._backend.decode_batch([row.tolist() for row in ids], skip_special_tokens=True)


def step_of(content: Mapping[str, Any], arrays: Mapping[str, np.ndarray], texts: Texts) -> Step:
    texts.vocabulary.update(content.get("vocabulary", ()))
    validation = [Sample(**sample) for sample in content["validation"]]
    rows = content["rows"]
    return Step(
        number=content["number"],
        time=content["time"],
        metrics=content["metrics"],
        seconds=content["seconds"],
        batch=content["batch"],
        events=content["events"],
        samples=[*(batch_samples(rows, arrays, texts) if rows else ()), *validation],
    )


def batch_samples(
    rows: Mapping[str, Any], arrays: Mapping[str, np.ndarray], texts: Texts
) -> Iterator[Sample]:
    """The rows of a trained batch."""
    prompt_ids = split(arrays["prompt_ids"], arrays["prompt_lengths"])
    response_ids = split(arrays["response_ids"], arrays["response_lengths"])
    columns = {
        name.removeprefix(COLUMN): split(values, arrays["response_lengths"])
        for name, values in arrays.items()
        if name.startswith(COLUMN)
    }
    prompts = rows["prompt"] if "prompt" in rows else texts.of_rows(prompt_ids)
    responses = rows["response"] if "response" in rows else texts.of_rows(response_ids)
    for row in range(len(rows["uid"])):
        yield Sample(
            uid=rows["uid"][row],
            prompt=prompts[row],
            response=responses[row],
            truth=rows["truth"][row],
            source=rows["source"][row],
            score=rows["score"][row],
            turns=rows["turns"][row],
            extras={name: values[row] for name, values in rows["extras"].items()},
            prompt_ids=prompt_ids[row],
            response_ids=response_ids[row],
            columns={name: values[row] for name, values in columns.items()},
        )


def split(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """One array per sample; views."""
    return np.split(values, np.cumsum(lengths)[:-1])
