"""The driver's part of a distillation: it gives every row its teacher and its teacher's prompt.

    before the run    tokenizers agree, every row of the data has a teacher, templates find columns
    in annotate       teacher_index, teacher_prompts -> teachers in workers, teachers at endpoints
                      rows without an answer leave the batch and are counted

Modes over the whole vocabulary get no columns of answers: the training pass asks the teachers.

A teacher behind an OpenAI-compatible server that returns the log-probabilities of a prompt.

    POST <endpoint>/completions  {prompt: [ids], max_tokens: 1, prompt_logprobs: K}
      -> choices[0].prompt_logprobs = [null, {"<id>": {"logprob": ...}, ...}, ...]

One request for each row, some at a time, each with a deadline; the second attempt asks the next
server. An answer that does not come, or that is not about the tokens that were sent, is a missing
one: it never counts as 0.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.config.distillation import TeacherConfig, teachers_of
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.protocol.padded import SESSION_UID
from verl.trainer.distillation.replicas import Replicas
from verl.utils.dataset.prompts import encode_prompt
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.dataset.tables import DataError
from verl.utils.device import resolve_device
from verl.utils.environment import teacher_token
from verl.utils.fs import copy_to_local
from verl.utils.http_json import RequestFailed, post_json
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.actor.teacher import (
    PROMPT_MASK,
    PROMPTS,
    TEACHER_INDEX,
    TEACHER_LOG_PROBS,
    TOP_IDS,
    TOP_LOG_PROBS,
    answers_in_advance,
    num_top_tokens,
)

logger = logging.getLogger(__name__)

MAX_SHOWN = 3


class TooFewAnswers(RuntimeError):
    """More responses of a step than allowed have no answer of their teacher."""


class Teaching:
    """The teachers of a run, as the driver knows them."""

    def __init__(self, config: PPOConfig, tokenizer: Any, dataset: Any) -> None:
        """Raises ValueError for teachers that cannot teach this policy, or these rows."""
        self.config = config.distillation
        self._loss = self.config.distillation_loss
        self._tokenizer = tokenizer
        self._data = config.data
        self.teachers = teachers_of(self.config)
        self._is_alone = len(self.teachers) == 1
        self._tools = dataset.tool_schemas if isinstance(dataset, RLHFDataset) else []
        number = 0
        self._numbers: list[int] = []
        """Of each teacher: its number in the workers, -1 for one that is served."""
        self._endpoints: dict[int, EndpointTeacher] = {}
        self._run = config
        served: list[tuple[int, str, TeacherConfig]] = []
        for place, (name, teacher) in enumerate(self.teachers.items()):
            if teacher.model_path is not None:
                refuse_other_tokenizer(name, teacher, tokenizer)
            if teacher.is_served:
                served.append((place, name, teacher))
                self._numbers.append(-1)
            else:
                self._numbers.append(number)
                number += 1
        if isinstance(dataset, RLHFDataset):
            self._check_rows(dataset)
        self._replicas: list[Replicas] = []
        try:
            for place, name, teacher in served:  # processes start when all else is right
                self._endpoints[place] = EndpointTeacher(name, teacher, self._start(name, teacher))
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, teacher: TeacherConfig) -> Replicas | None:
        """The replicas of a teacher that this run serves; None for one that others serve."""
        if not teacher.num_replicas:
            return None
        trainer = self._run.trainer
        first = trainer.n_gpus_per_node if self.config.nnodes else 0
        count = self.config.n_gpus_per_node if self.config.nnodes else trainer.n_gpus_per_node
        replicas = Replicas(
            name, teacher, resolve_device(trainer.device), range(first, first + count)
        )
        self._replicas.append(replicas)
        return replicas

    def close(self) -> None:
        """End the processes of teachers."""
        for replicas in self._replicas:
            replicas.close()

    def _check_rows(self, dataset: RLHFDataset) -> None:
        """Every row has a teacher whose template finds its columns."""
        for item in range(len(dataset)):
            row = dataset.dataframe[item]
            place = self.teacher_of({"data_source": row.get(self._data.reward_fn_key), **row})
            template = list(self.teachers.values())[place].privileged_prompt
            if template is not None:
                filled(template, "", dataset[item])

    def teacher_of(self, row: Mapping[str, Any]) -> int:
        """The place of a row's teacher among `teachers`."""
        keys = [teacher.key for teacher in self.teachers.values()]
        if self._is_alone and keys[0] is None:
            return 0
        value = row.get(self.config.teacher_key)
        if value not in keys:
            raise DataError(
                f"a row has {self.config.teacher_key}={value!r}, for which there is no teacher; "
                f"distillation.teacher_models have the keys {keys}. Add a teacher with this key, "
                "take the row out, or choose by another column (distillation.teacher_key)"
            )
        return keys.index(value)

    # ---- a step ----------------------------------------------------------------------------------

    def annotate(self, batch: DataProto, workers: Any) -> tuple[DataProto, dict[str, float]]:
        """The batch with what its teachers say, or with what the update needs to ask them."""
        places = np.array([self.teacher_of(row) for row in rows_of(batch)])
        batch = self._with_prompts(batch, places)
        numbers = torch.tensor([self._numbers[place] for place in places])
        if len(set(self._numbers)) > 1:
            batch.batch[TEACHER_INDEX] = numbers
        if not answers_in_advance(self._loss):
            return batch, {}
        if -1 in self._numbers:
            return self._with_answers(batch, places, numbers, workers)
        return batch.union(workers.compute_teacher_log_prob(batch)), {}

    def _with_answers(
        self, batch: DataProto, places: np.ndarray, numbers: torch.Tensor, workers: Any
    ) -> tuple[DataProto, dict[str, float]]:
        """Those of endpoints, and of workers where some teachers are there."""
        has_local = bool((numbers >= 0).any())
        columns: dict[str, torch.Tensor] = {}
        if has_local:
            columns = dict(workers.compute_teacher_log_prob(batch).batch.items())
        is_missing = np.zeros(len(batch), dtype=bool)
        for place, teacher in self._endpoints.items():
            chosen = np.flatnonzero(places == place)
            if not len(chosen):
                continue
            found, missing = teacher.answers(batch.select_idxs(chosen), num_top_tokens(self._loss))
            is_missing[chosen[missing]] = True
            for name, values in found.items():
                if name not in columns:
                    columns[name] = values.new_zeros(len(batch), *values.shape[1:])
                columns[name][torch.from_numpy(chosen)] = values
        batch.batch.update(columns)
        metrics = {"distillation/num_missing_answers": float(is_missing.sum())}
        return self._without(batch, is_missing), metrics

    def _without(self, batch: DataProto, is_missing: np.ndarray) -> DataProto:
        """The rows that have an answer; a session that misses one goes as a whole."""
        limit = self.config.max_missing_ratio
        if is_missing.mean() > limit or is_missing.all():
            raise TooFewAnswers(
                f"{int(is_missing.sum())} of {len(is_missing)} responses have no answer of their "
                f"teacher's endpoint; distillation.max_missing_ratio allows {limit:.0%}"
            )
        if not is_missing.any():
            return batch
        if SESSION_UID in batch.non_tensor_batch:
            sessions = batch.non_tensor_batch[SESSION_UID]
            is_missing = np.isin(sessions, sessions[is_missing])
        return batch.select_idxs(~is_missing)

    # ---- privileged prompts ----------------------------------------------------------------------

    def _with_prompts(self, batch: DataProto, places: np.ndarray) -> DataProto:
        """`teacher_prompts`, where some teacher reads more than its student does."""
        templates = [teacher.privileged_prompt for teacher in self.teachers.values()]
        if not any(templates):
            return batch
        made: dict[tuple[int, str, tuple[int, ...]], list[int]] = {}
        prompts = []
        for place, row, own in zip(places, rows_of(batch), own_prompts(batch), strict=True):
            key = (int(place), str(row["uid"]), tuple(own))  # rows of a session differ in prompts
            template = templates[place]
            if key not in made:
                made[key] = own if template is None else self._privileged(template, row, own)
            prompts.append(made[key])
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self._tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for number, prompt in enumerate(prompts):
            ids[number, width - len(prompt) :] = torch.tensor(prompt)
            mask[number, width - len(prompt) :] = 1
        batch.batch[PROMPTS], batch.batch[PROMPT_MASK] = ids, mask
        return batch

    def _privileged(self, template: str, row: Mapping[str, Any], own: Sequence[int]) -> list[int]:
        raw = row["raw_prompt"]
        if self._encode(raw) != list(own):
            raise DataError(
                "a privileged_prompt takes the place of the row's prompt, but the agent loop has "
                "made another prompt of it than the chat template does; use a loop that sends "
                "prompts as they are, or leave privileged_prompt out"
            )
        if isinstance(raw, str):
            return self._encode(filled(template, raw, row))
        last = max(i for i, message in enumerate(raw) if message["role"] == "user")
        content = filled(template, raw[last]["content"], row)
        return self._encode([*raw[:last], {**raw[last], "content": content}, *raw[last + 1 :]])

    def _encode(self, prompt: Any) -> list[int]:
        return encode_prompt(
            prompt,
            self._tokenizer,
            tools=self._tools,
            template_kwargs=self._data.apply_chat_template_kwargs,
        )


def rows_of(batch: DataProto) -> list[dict[str, Any]]:
    """The object columns row by row."""
    columns = batch.non_tensor_batch
    return [{name: column[row] for name, column in columns.items()} for row in range(len(batch))]


def own_prompts(batch: DataProto) -> list[list[int]]:
    """The tokens of each row's prompt, without padding."""
    prompts = batch.batch["prompts"]
    masks = batch.batch["attention_mask"][:, : prompts.shape[1]].bool()
    return [ids[mask].tolist() for ids, mask in zip(prompts, masks, strict=True)]


def filled(template: str, prompt: str, row: Mapping[str, Any]) -> str:
    """The template with a row's columns; `ground_truth` is that of its reward model."""
    known = {**row, "prompt": prompt}
    reward = row.get("reward_model")
    if isinstance(reward, Mapping) and "ground_truth" not in known:
        known["ground_truth"] = reward.get("ground_truth")
    try:
        return template.format(**known)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise DataError(
            f"privileged_prompt is {template!r}, which fails on a row ({error!r}); its columns "
            f"are: {', '.join(sorted(known))}"
        ) from error


def refuse_other_tokenizer(
    name: str, teacher: TeacherConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A teacher must give the same id to every token, or its answers are about other text."""
    assert teacher.model_path is not None
    path = f"distillation.teacher_models.{name}.model_path"
    try:
        other = hf_tokenizer(copy_to_local(teacher.model_path))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is {teacher.model_path!r}, which has no tokenizer to compare with the "
            f"policy's: {error}"
        ) from error
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours == theirs:
        return
    differing = [token for token, number in ours.items() if theirs.get(token) != number]
    differing += [token for token in theirs if token not in ours]
    shown = ", ".join(f"{t!r} ({ours.get(t)}, {theirs.get(t)})" for t in differing[:MAX_SHOWN])
    raise ValueError(
        f"{path} is {teacher.model_path!r}, whose tokenizer has {len(theirs)} tokens; the policy's "
        f"has {len(ours)}, and {len(differing)} of them differ: {shown}. A teacher judges the "
        "policy's token ids, so both need one tokenizer"
    )


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
