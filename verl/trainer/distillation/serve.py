"""Serve a teacher: `python -m verl.trainer.distillation.serve --model PATH`.

It answers `POST /v1/completions` with the log-probabilities of the prompt's tokens and of the
likeliest ones (`prompt_logprobs`), in the shape that vLLM gives them. It generates nothing. One
request is computed at a time.
"""

import argparse
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.utils.device import resolve_device
from verl.utils.json_server import JsonServer, Refusal
from verl.workers.engine import EngineRegistry, EngineSpec
from verl.workers.engine.outputs import Outputs

MAX_BODY_BYTES = 16 << 20


class TeacherService:
    """A frozen model and the route that asks it."""

    def __init__(self, path: str, device: str = "auto", dtype: str = "auto") -> None:
        spec = EngineSpec(
            model=HFModelConfig(path=path),
            engine=FSDPEngineConfig(dtype=dtype),
            optimizer=None,
            device=resolve_device(device),
        )
        self.path = path
        self.engine = EngineRegistry.new(spec)
        self._one_at_a_time = threading.Lock()
        self.routes = {
            ("POST", "/v1/completions"): self.complete,
            ("GET", "/v1/models"): lambda _: {"data": [{"id": path, "object": "model"}]},
        }

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
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": "length",
            "prompt_logprobs": self.prompt_log_probs(ids, top_k),
        }
        return {"object": "text_completion", "model": self.path, "choices": [choice]}

    def prompt_log_probs(self, ids: list[int], top_k: int) -> list[Any]:
        """For each token but the first, its log-probability and the likeliest ones."""
        if len(ids) == 1:
            return [None]
        tokens = torch.tensor([ids])
        columns: Any = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "position_ids": torch.arange(len(ids))[None],
            "responses": tokens[:, 1:],
        }
        with self._one_at_a_time:
            found = self.engine.infer_batch(
                TensorDict(columns, batch_size=1),
                micro_batching=[[0]],
                outputs=Outputs(top_k=top_k),
            )
        positions: list[Any] = [None]
        names = ("log_probs", "top_ids", "top_log_probs")
        for token, own, best, values in zip(
            ids[1:], *(found[name][0].tolist() for name in names), strict=True
        ):
            entries = {
                str(one): {"logprob": value, "rank": rank, "decoded_token": None}
                for rank, (one, value) in enumerate(zip(best, values, strict=True), start=1)
            }
            entries.setdefault(str(token), {"logprob": own, "rank": None, "decoded_token": None})
            positions.append(entries)
        return positions


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m verl.trainer.distillation.serve", description="Serve a teacher over HTTP."
    )
    parser.add_argument("--model", required=True, help="folder or Hugging Face name")
    parser.add_argument("--port", type=int, default=8400, help="0 takes a free one")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args(arguments)
    try:
        service = TeacherService(options.model, options.device, options.dtype)
        server = JsonServer(
            service.routes, port=options.port, token="", max_body_bytes=MAX_BODY_BYTES
        )
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(f"endpoint: {server.url}/v1\n")
    sys.stdout.flush()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.stdout.write("stopped\n")


if __name__ == "__main__":
    main()
