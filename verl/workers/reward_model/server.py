"""A reward model behind HTTP, for reward functions that ask it themselves.

    reward function                          this process
      POST http://<address>/classify  --->     a thread per connection, one score at a time

Listens on the loopback interface. The address ends in a key made for this run, and a request
without it is refused, so that other users of the machine get nothing. There are two endpoints:
vLLM's `/classify`, where the score is `probs[0]`, and `/v1/embeddings` as SGLang serves it for a
reward model, where it is the last value of `embedding`. The score is the model's, not squashed.

A trainer serves the model that it has loaded anyway; `RewardModelManager` loads and serves one for
programs without a trainer.
"""

import json
import secrets
import threading
from collections.abc import Callable, Sequence
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl.config.reward import FSDPRewardModelConfig
from verl.single_controller import ClassWithInitArgs, ResourcePool
from verl.single_controller.local import LocalWorkerGroup
from verl.utils.device import resolve_device
from verl.workers.roles.reward_model import RewardModelWorker

HOST = "127.0.0.1"
KEY_BYTES = 16
MAX_BODY_BYTES = 8 << 20
MAX_TEXTS = 1024
IDLE_SECONDS = 30.0

ScoreTexts = Callable[[Sequence[str]], list[float]]


class BadRequest(ValueError):
    """What the sender got wrong."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class RewardModelServer:
    """Has its address from the start; answers 503 until `score_texts` is set, and while asleep."""

    def __init__(self) -> None:
        self.score_texts: ScoreTexts | None = None
        self.is_asleep = False
        self._key = secrets.token_urlsafe(KEY_BYTES)
        self._one_at_a_time = threading.Lock()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer((HOST, 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address to put between `http://` and `/classify`."""
        return f"{HOST}:{self._server.server_port}/{self._key}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(IDLE_SECONDS)
        self._server.server_close()

    def endpoint_of(self, path: str) -> str:
        """What follows the key; `BadRequest` where the key is wrong or nothing is there."""
        key, _, endpoint = path.removeprefix("/").partition("/")
        if not compare_digest(key.encode(), self._key.encode()):
            raise BadRequest(403, "the address ends in a key, which is missing or wrong here")
        if endpoint not in ("classify", "v1/embeddings"):
            raise BadRequest(404, f"there is no {endpoint!r}; ask classify or v1/embeddings")
        return endpoint

    def answer(self, endpoint: str, request: Any) -> dict[str, Any]:
        """The body of the answer to a request; `BadRequest` for one that has none."""
        texts = texts_of(request)
        if self.score_texts is None or self.is_asleep:
            raise BadRequest(503, "the reward model is not ready")
        with self._one_at_a_time:
            scores = self.score_texts(texts)
        if endpoint == "classify":
            entries = [{"label": "score", "probs": [score], "num_classes": 1} for score in scores]
        else:
            entries = [{"object": "embedding", "embedding": [score]} for score in scores]
        rows = [{"index": index, **entry} for index, entry in enumerate(entries)]
        return {"object": "list", "data": rows}


def texts_of(request: Any) -> list[str]:
    """`input` of a request: a text or a list of texts."""
    texts = request.get("input") if isinstance(request, dict) else None
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise BadRequest(400, "input must be a text or a list of texts, none of them empty")
    if not 0 < len(texts) <= MAX_TEXTS:
        raise BadRequest(400, f"input has {len(texts)} texts; it may have 1 to {MAX_TEXTS}")
    return texts


class _Handler(BaseHTTPRequestHandler):
    owner: RewardModelServer
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        try:
            endpoint = self.owner.endpoint_of(self.path)  # before the body is read
            status, body = 200, self.owner.answer(endpoint, self._request())
        except BadRequest as fault:
            self.close_connection = True
            status, body = fault.status, {"error": str(fault)}
        except Exception as error:
            status, body = 500, {"error": f"{type(error).__name__}: {error}"}
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _request(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise BadRequest(413, f"Content-Length must be a number of at most {MAX_BODY_BYTES}")
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise BadRequest(400, f"the body is no JSON: {error}") from error

    def log_message(self, format: str, *args: Any) -> None:
        """Does not log requests: the path holds the key."""


class RewardModelManager:
    """Loads the model that the section `reward_model` names, and serves it until `close`."""

    def __init__(self, config: FSDPRewardModelConfig, resource_pool: Any = None) -> None:
        worker = ClassWithInitArgs(RewardModelWorker, config, device=resolve_device("auto"))
        self.workers: Any = LocalWorkerGroup(resource_pool or ResourcePool([1]), worker)
        self.workers.init_model()
        self._server = RewardModelServer()
        self._server.score_texts = self.workers.workers[0].score_texts

    def get_router_address(self) -> str:
        """To be put between `http://` and `/classify`; a custom reward function gets it as
        `reward_router_address`."""
        return self._server.address

    def sleep(self) -> None:
        """Turn requests away until `wake_up`, so that others have the device for themselves."""
        self._server.is_asleep = True

    def wake_up(self) -> None:
        self._server.is_asleep = False

    def close(self) -> None:
        self._server.close()
