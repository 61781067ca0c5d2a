"""A teacher behind an OpenAI-compatible server that returns the log-probabilities of a prompt.

    POST <endpoint>/completions  {prompt: [ids], max_tokens: 1, prompt_logprobs: K}
      -> choices[0].prompt_logprobs = [null, {"<id>": {"logprob": ...}, ...}, ...]

One request for each row, some at a time, each with a deadline; the second attempt asks the next
server. An answer that does not come, or that is not about the tokens that were sent, is a missing
one: it never counts as 0.
"""

import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl.config.distillation import TeacherConfig
from verl.protocol import DataProto
from verl.trainer.distillation.replicas import Replicas
from verl.utils.environment import teacher_token
from verl.utils.http_json import RequestFailed, post_json
from verl.workers.actor.teacher import (
    PROMPT_MASK,
    PROMPTS,
    TEACHER_LOG_PROBS,
    TOP_IDS,
    TOP_LOG_PROBS,
)

logger = logging.getLogger(__name__)

ATTEMPTS = 2
MAX_AT_ONCE = 16
MAX_ANSWER_BYTES = 1 << 28

Answer = tuple[list[float], list[list[int]], list[list[float]]]
"""Of each response token: its log-probability, the likeliest ids, and theirs."""


class EndpointTeacher:
    """Asks one server, or several that have the same model."""

    def __init__(
        self,
        name: str,
        teacher: TeacherConfig,
        replicas: Replicas | None = None,
    ) -> None:
        """`replicas` of this run, or whoever serves `teacher.endpoint`."""
        self.name = name
        self._endpoint = str(teacher.endpoint)
        self._replicas = replicas
        self._token = teacher_token() if replicas is None else replicas.token
        self._model = teacher.model_path
        self._timeout_seconds = teacher.timeout_seconds

    def answers(self, batch: DataProto, top_k: int) -> tuple[dict[str, Tensor], list[int]]:
        """Columns of what it says of the responses, and the rows that have no answer."""
        num_columns = batch.batch["responses"].shape[1]
        servers = [self._endpoint] if self._replicas is None else self._replicas.urls()
        urls = [f"{address.rstrip('/')}/completions" for address in servers]
        ask = partial(self._ask, urls=urls, top_k=top_k)
        with ThreadPoolExecutor(MAX_AT_ONCE * len(urls)) as pool:
            found = list(pool.map(ask, range(len(batch)), requested_ids(batch)))
        shape = (len(batch), num_columns)
        log_probs = torch.zeros(shape)
        ids = torch.zeros(*shape, top_k, dtype=torch.int32)
        top_log_probs = torch.full((*shape, top_k), -math.inf)
        for row, answer in enumerate(found):
            if answer is not None and answer[0]:
                length = len(answer[0])
                log_probs[row, :length] = torch.tensor(answer[0])
                if top_k:
                    ids[row, :length] = torch.tensor(answer[1], dtype=torch.int32)
                    top_log_probs[row, :length] = torch.tensor(answer[2])
        columns = {TEACHER_LOG_PROBS: log_probs}
        if top_k:
            columns |= {TOP_IDS: ids, TOP_LOG_PROBS: top_log_probs}
        return columns, [row for row, answer in enumerate(found) if answer is None]

    def _ask(
        self, row: int, request: tuple[list[int], int], *, urls: Sequence[str], top_k: int
    ) -> Answer | None:
        """The answer about a row's tokens, of which the last `request[1]` are the response."""
        ids, num_response = request
        payload = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": max(top_k, 1),
        }
        for attempt in range(ATTEMPTS):
            try:
                reply = post_json(
                    urls[(row + attempt) % len(urls)],
                    payload,
                    timeout_seconds=self._timeout_seconds,
                    max_response_bytes=MAX_ANSWER_BYTES,
                    token=self._token,
                )
                return read_answer(reply, ids, num_response, top_k)
            except (RequestFailed, OSError, ValueError) as error:
                logger.warning("teacher %s gave no answer: %s", self.name, error)
        return None


def requested_ids(batch: DataProto) -> list[tuple[list[int], int]]:
    """The tokens of each row as its teacher reads them, and how many are the response."""
    rows = batch.batch
    num_columns = rows["responses"].shape[1]
    masks = rows["attention_mask"].bool()
    has_own = PROMPTS in rows.keys()  # noqa: SIM118 (a TensorDict)
    prompts = rows[PROMPTS] if has_own else rows["input_ids"][:, :-num_columns]
    prompt_masks = rows[PROMPT_MASK].bool() if has_own else masks[:, :-num_columns]
    found = []
    for row in range(len(batch)):
        prompt = prompts[row][prompt_masks[row]].tolist()
        response = rows["responses"][row][masks[row, -num_columns:]].tolist()
        found.append((prompt + response, len(response)))
    return found


def read_answer(reply: Any, ids: list[int], num_response: int, top_k: int) -> Answer:
    """Of a server's reply the part about the response; ValueError if it is about other tokens."""
    try:
        positions = reply["choices"][0]["prompt_logprobs"]
    except (KeyError, IndexError, TypeError):
        raise ValueError("the reply has no choices[0].prompt_logprobs") from None
    if not isinstance(positions, list) or len(positions) != len(ids):
        raise ValueError(f"prompt_logprobs must have {len(ids)} entries, one for each token")
    sampled, top_ids, top_values = [], [], []
    for token, known in zip(ids[-num_response:], positions[-num_response:], strict=False):
        if not num_response:
            break
        values = {int(key): float(entry["logprob"]) for key, entry in known.items()}
        if token not in values or len(values) < top_k:
            raise ValueError(f"prompt_logprobs has no {top_k} tokens with {token} among them")
        best = sorted(values, key=lambda one: (-values[one], one))[:top_k]
        sampled.append(values[token])
        top_ids.append(best)
        top_values.append([values[one] for one in best])
    return sampled, top_ids, top_values
