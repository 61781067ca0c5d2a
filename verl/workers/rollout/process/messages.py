"""What requests, tokens, facts and errors look like on the wire.

    to the engine                                       from the engine
      {"call": name, "number": n, ...arguments}           {"answer": n, "value": ...}
                                                          {"answer": n, "error": kind, "text": ...}
                                                          {"deltas": [[n, sample, ...], ...],
                                                           "cache_usage": share}
                                                          {"heartbeat": seconds of the current work}

Requests are calls whose answer is the last of their deltas; only a refusal is an answer.
"""

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.utils.images import as_png
from verl.utils.media import Media
from verl.workers.rollout.base import GenerationRequest, SamplingParams, TokenDelta
from verl.workers.weight_sync import bucket
from verl.workers.weight_sync.bucket import WeightSyncError

MAX_TOKENS_PER_MESSAGE = 1 << 16
BYTES_PER_TOKEN = 64
"""What a token takes of a message, about: its id, log-probability and version as text."""
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
}
"""Of tensors on the wire."""


class EngineStateError(RuntimeError):
    """A call that does not fit what the engine is doing: sleep while requests run, new weights then
    (unless in flight), a request while it sleeps."""


_ANSWERED: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, EngineStateError, *vars(bucket).values())
    if isinstance(kind, type) and issubclass(kind, Exception)
}
ANSWERED_ERRORS = (ValueError, EngineStateError, WeightSyncError)
"""What a call may raise in the engine's process without ending it."""


def error_fields(error: Exception) -> dict[str, str]:
    """The nearest kind that the other side knows, and the text."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ANSWERED)
    return {"error": kind, "text": str(error)}


def error_of(fields: Mapping[str, Any]) -> Exception:
    return _ANSWERED[fields["error"]](fields["text"])


def request_fields(request: GenerationRequest, media_form: str = "") -> dict[str, Any]:
    """`media_form` is how the engine takes images (`EngineFacts.media`)."""
    if request.media and not media_form:
        raise ValueError(
            f"request {request.request_id} has {len(request.media)} images, and its engine's model "
            "is given none"
        )
    return {
        "request_id": request.request_id,
        "prompt_ids": [int(token) for token in request.prompt_ids],
        "params": asdict(request.params),
        "num_samples": request.num_samples,
        "seeds": _plain(request.seeds),
        "session_ids": _plain(request.session_ids),
        "num_sampled": request.num_sampled,
        "media": [media_fields(one, media_form) for one in request.media],
    }


def request_of(fields: Mapping[str, Any]) -> GenerationRequest:
    params = fields["params"]
    return GenerationRequest(
        request_id=fields["request_id"],
        prompt_ids=fields["prompt_ids"],
        params=SamplingParams(
            **{
                **params,
                "stop": tuple(params["stop"]),
                "stop_token_ids": tuple(params["stop_token_ids"]),
            }
        ),
        num_samples=fields["num_samples"],
        seeds=_tuple(fields["seeds"]),
        session_ids=_tuple(fields["session_ids"]),
        num_sampled=fields["num_sampled"],
        media=tuple(media_of(one) for one in fields["media"]),
    )


def media_fields(media: Media, form: str) -> dict[str, Any]:
    """An image: the tower's arguments, or a file for an engine that has a processor of its own."""
    source = media.source if isinstance(media.source, bytes | None) else as_png(media.source)
    inputs = media.inputs if form == "inputs" else {}
    return {
        "kind": media.kind,
        "content_hash": media.content_hash,
        "inputs": {name: tensor_fields(tensor) for name, tensor in inputs.items()},
        "places": media.places.tolist(),
        "grid": _plain(media.grid),
        "span": _plain(media.span),
        "file": None if source is None or form != "files" else _as_text(source),
    }


def media_of(fields: Mapping[str, Any]) -> Media:
    file = fields["file"]
    return Media(
        kind=fields["kind"],
        content_hash=fields["content_hash"],
        inputs={name: tensor_of(tensor) for name, tensor in fields["inputs"].items()},
        places=np.array(fields["places"], dtype=np.int64),
        grid=_tuple(fields["grid"]),  # pyright: ignore[reportArgumentType]
        span=_tuple(fields["span"]),  # pyright: ignore[reportArgumentType]
        source=None if file is None else base64.b64decode(file),
    )


def tensor_fields(tensor: Tensor) -> list[Any]:
    values = tensor.detach().cpu().contiguous()
    octets = values.flatten().view(torch.uint8).numpy().tobytes()
    return [str(values.dtype).removeprefix("torch."), list(values.shape), _as_text(octets)]


def tensor_of(fields: Sequence[Any]) -> Tensor:
    dtype, shape, text = fields
    octets = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    return octets.view(DTYPES[dtype]).view(shape)


def _as_text(octets: bytes) -> str:
    return base64.b64encode(octets).decode("ascii")


def delta_fields(number: int, delta: TokenDelta, version: int) -> list[Any]:
    """`version` is that of tokens whose engine does not say."""
    versions = delta.policy_versions or [version] * len(delta.token_ids)
    return [
        number,
        delta.sample,
        list(delta.token_ids),
        list(delta.log_probs),
        list(versions),
        delta.stop_reason,
        None if delta.routed_experts is None else array_fields(delta.routed_experts),
    ]


def delta_of(fields: Sequence[Any]) -> tuple[int, TokenDelta]:
    number, sample, token_ids, log_probs, versions, stop_reason, routes = fields
    return number, TokenDelta(
        sample=sample,
        token_ids=tuple(token_ids),
        log_probs=tuple(log_probs),
        policy_versions=tuple(versions),
        stop_reason=stop_reason,
        routed_experts=None if routes is None else array_of(routes),
    )


def array_fields(array: np.ndarray) -> list[Any]:
    return [str(array.dtype), list(array.shape), _as_text(np.ascontiguousarray(array).tobytes())]


def array_of(fields: Sequence[Any]) -> np.ndarray:
    dtype, shape, text = fields
    return np.frombuffer(base64.b64decode(text), dtype=dtype).reshape(shape)


def delta_messages(
    deltas: Iterable[tuple[int, TokenDelta]], version: int
) -> Iterator[dict[str, Any]]:
    """Pack deltas into as few messages as their length allows."""
    rows: list[list[Any]] = []
    length = 0
    for number, delta in deltas:
        tokens = len(delta.token_ids)
        if delta.routed_experts is not None:
            tokens += delta.routed_experts.nbytes // BYTES_PER_TOKEN
        if rows and length + tokens > MAX_TOKENS_PER_MESSAGE:
            yield {"deltas": rows}
            rows, length = [], 0
        rows.append(delta_fields(number, delta, version))
        length += tokens
    if rows:
        yield {"deltas": rows}


def _plain(values: Sequence[Any] | None) -> list[Any] | None:
    return None if values is None else list(values)


def _tuple(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)
