"""Serve a teacher: `python -m verl.trainer.distillation.serve --model PATH`.

It answers `POST /v1/completions` with the log-probabilities of the prompt's tokens and of the
likeliest ones (`prompt_logprobs`), in the shape that vLLM gives them. It generates nothing.

    requests (threads) -> waiting -> one thread: as many as fit into a pass -> answers

What waits while a pass runs is computed together in the next one, up to `max_num_seqs` rows and
`max_num_batched_tokens` tokens.
"""

import argparse
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.utils.device import resolve_device
from verl.utils.environment import teacher_token
from verl.utils.json_server import JsonServer, Refusal
from verl.workers.engine import EngineRegistry, EngineSpec
from verl.workers.engine.outputs import Outputs

MAX_BODY_BYTES = 16 << 20
TIMEOUT_SECONDS, IDLE_SECONDS = 600.0, 60.0
NAMES = ("log_probs", "top_ids", "top_log_probs")

Positions = list[Any]
"""Of each token but the first: its log-probability and the likeliest ones, by token id."""


@dataclass(frozen=True)
class Waiting:
    """A prompt whose log-probabilities somebody waits for."""

    ids: list[int]
    top_k: int
    answer: "Future[Positions]"


class TeacherService:
    """A frozen model and the route that asks it."""

    def __init__(
        self,
        path: str,
        device: str = "auto",
        dtype: str = "auto",
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
    ) -> None:
        spec = EngineSpec(
            model=HFModelConfig(path=path),
            engine=FSDPEngineConfig(dtype=dtype),
            optimizer=None,
            device=resolve_device(device),
        )
        self.path = path
        self.engine = EngineRegistry.new(spec)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len = max_model_len
        self.routes = {
            ("POST", "/v1/completions"): self.complete,
            ("GET", "/v1/models"): lambda _: {"data": [{"id": path, "object": "model"}]},
        }
        self._waiting: deque[Waiting] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._run_passes, name="teacher's passes", daemon=True).start()

    def complete(self, request: Any) -> dict[str, Any]:
        if not isinstance(request, dict):
            raise Refusal(422, "the body must be a JSON object")
        ids: Any = request.get("prompt")
        top_k = request.get("prompt_logprobs")
        is_ids = isinstance(ids, list) and all(isinstance(one, int) for one in ids)
        size = self.engine.module.config.get_text_config().vocab_size
        if not is_ids or not all(0 <= one < size for one in ids) or not ids:
            raise Refusal(422, f"`prompt` must be a list of token ids from 0 to {size - 1}")
        if not isinstance(top_k, int) or not 1 <= top_k <= size:
            raise Refusal(422, f"`prompt_logprobs` must be from 1 to {size}")
        longest = self.max_model_len
        if longest is not None and len(ids) > longest:
            raise Refusal(422, f"`prompt` has {len(ids)} tokens; max_model_len is {longest}")
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": "length",
            "prompt_logprobs": self.prompt_log_probs(ids, top_k),
        }
        return {"object": "text_completion", "model": self.path, "choices": [choice]}

    def prompt_log_probs(self, ids: list[int], top_k: int) -> Positions:
        """For each token but the first, its log-probability and the likeliest ones."""
        if len(ids) == 1:
            return [None]
        waiting = Waiting(ids, top_k, Future())
        with self._changed:
            self._waiting.append(waiting)
            self._changed.notify()
        return waiting.answer.result(TIMEOUT_SECONDS)

    def _run_passes(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: bool(self._waiting), IDLE_SECONDS):
                    continue
                rows = self._admitted()
            try:
                for waiting, positions in zip(rows, self._computed(rows), strict=True):
                    waiting.answer.set_result(positions)
            except Exception as error:  # the boundary: who asked is told
                for waiting in rows:
                    if not waiting.answer.done():
                        waiting.answer.set_exception(error)

    def _admitted(self) -> list[Waiting]:
        """The next pass: the first that waits, and those behind it that fit."""
        rows = [self._waiting.popleft()]
        num_tokens = len(rows[0].ids)
        while self._waiting and len(rows) < self.max_num_seqs:
            num_tokens += len(self._waiting[0].ids)
            if num_tokens > self.max_num_batched_tokens:
                break
            rows.append(self._waiting.popleft())
        return rows

    def _computed(self, rows: Sequence[Waiting]) -> list[Positions]:
        tokens = pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True)  # (B, L)
        lengths = torch.tensor([len(row.ids) for row in rows])
        columns: Any = {
            "input_ids": tokens,
            "attention_mask": (torch.arange(tokens.shape[1]) < lengths[:, None]).long(),
            "position_ids": torch.arange(tokens.shape[1]).expand(tokens.shape),
            "responses": tokens[:, 1:],
        }
        found = self.engine.infer_batch(
            TensorDict(columns, batch_size=len(rows)),
            micro_batching=[list(range(len(rows)))],
            outputs=Outputs(top_k=max(row.top_k for row in rows)),
        )
        return [
            positions_of(row, *(found[name][number] for name in NAMES))
            for number, row in enumerate(rows)
        ]


def positions_of(row: Waiting, own: Tensor, best: Tensor, values: Tensor) -> Positions:
    """A row's answer in vLLM's shape, of (T,), (T, K) and (T, K)."""
    positions: Positions = [None]
    for token, log_prob, ids, log_probs in zip(
        row.ids[1:], own.tolist(), best.tolist(), values.tolist(), strict=False
    ):
        likeliest = zip(ids[: row.top_k], log_probs, strict=False)
        entries = {
            str(one): {"logprob": value, "rank": rank, "decoded_token": None}
            for rank, (one, value) in enumerate(likeliest, start=1)
        }
        entries.setdefault(str(token), {"logprob": log_prob, "rank": None, "decoded_token": None})
        positions.append(entries)
    return positions


def teacher_server(service: TeacherService, port: int = 0) -> JsonServer:
    """On this machine only, for whoever has the token."""
    return JsonServer(
        service.routes,
        port=port,
        token=teacher_token() or None,
        max_body_bytes=MAX_BODY_BYTES,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m verl.trainer.distillation.serve", description="Serve a teacher over HTTP."
    )
    parser.add_argument("--model", required=True, help="folder or Hugging Face name")
    parser.add_argument("--port", type=int, default=8400, help="0 takes a free one")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="rows per pass")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="per pass")
    parser.add_argument("--max-model-len", type=int, help="longest prompt; longer are refused")
    options = parser.parse_args(arguments)
    try:
        service = TeacherService(
            options.model,
            options.device,
            options.dtype,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
        )
        server = teacher_server(service, options.port)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    shown = "the one in VERL_TEACHER_TOKEN" if teacher_token() else server.token
    sys.stdout.write(f"token: {shown}\nendpoint: {server.url}/v1\n")
    sys.stdout.flush()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.stdout.write("stopped\n")


if __name__ == "__main__":
    main()
