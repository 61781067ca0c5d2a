"""A server that speaks SGLang's native protocol, over the built-in engine and real weights.

What it answers has the form that SGLang 0.5.23 was seen to give: incremental streams, names of
requests that abort by their beginning, aborts of unknown names that do nothing, seeds that count
only with deterministic inference, one seed for all requests without one, log-probabilities before
filters and after temperature. Like the real one it does not survive a token beyond the vocabulary.

`--fault` makes it misbehave in one way: see `Faults`.
"""

import argparse
import itertools
import json
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from verl.models.loading import load_causal_lm
from verl.workers.rollout.base import GenerationRequest, SamplingParams, TokenDelta
from verl.workers.rollout.native.core import EngineCore
from verl.workers.rollout.native.engine import EngineLimits
from verl.workers.rollout.process.native import HostedNativeEngine

SEED_OF_REQUESTS_WITHOUT = 42
FAULTS = ("withhold", "pretend", "silent", "refuse_weights")
"""withhold: an update changes nothing; pretend: it changes the version alone; silent: generation
stops; refuse_weights: an update is answered with an error."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=True)
    for name in ("model-path", "load-format", "host", "config", "log-level", "dtype", "device"):
        parser.add_argument(f"--{name}")
    for name in ("attention-backend", "sampling-backend", "weight-version"):
        parser.add_argument(f"--{name}")
    for name in ("port", "random-seed", "context-length", "max-running-requests", "tp-size"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("max-prefill-tokens", "chunked-prefill-size", "max-total-tokens", "pp-size"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("stream-interval", "ep-size", "max-loras-per-batch", "max-lora-rank"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--lora-target-modules", nargs="*")
    parser.add_argument("--fault", choices=FAULTS)
    for name in ("skip-tokenizer-init", "incremental-streaming-output", "disable-cuda-graph"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("disable-radix-cache", "disable-overlap-schedule", "enable-memory-saver"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("enable-deterministic-inference", "enable-lora", "trust-remote-code"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


class Engine:
    """The built-in engine, stepped by a thread of its own."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        module = load_causal_lm(arguments.model_path).requires_grad_(False).eval()
        if arguments.load_format == "dummy":
            for parameter in module.parameters():
                parameter.data.fill_(0.01)
        self.vocabulary = module.config.vocab_size
        self.parameters = dict(module.named_parameters())
        self.hosted = HostedNativeEngine(
            EngineCore(
                module,
                EngineLimits(
                    max_num_seqs=arguments.max_running_requests,
                    max_prompt_tokens=arguments.context_length - 1,
                    max_response_tokens=arguments.context_length,
                ),
                eos_token_ids=[],
            )
        )
        self.lock = threading.Lock()
        self.numbers = itertools.count()
        self.arrived: dict[int, queue.SimpleQueue[TokenDelta]] = {}
        self.number_of: dict[str, int] = {}
        self.running: set[int] = set()
        self.weight_version = arguments.weight_version
        self.num_flushes = 0
        self.num_served = 0
        self.released: set[str] = set()
        self.adapter: str | None = None
        self.base: dict[str, torch.Tensor] = {}
        self.random = random.Random(arguments.random_seed)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            with self.lock:
                has_work = self.hosted.has_work() and self.arguments.fault != "silent"
                for number, delta in self.hosted.step() if has_work else ():
                    if delta.stop_reason:
                        self.running.remove(number)
                    self.arrived[number].put(delta)
            time.sleep(0 if has_work else 0.002)

    def submit(self, name: str, prompt: list[int], fields: dict[str, Any]) -> int:
        if max(prompt) >= self.vocabulary:
            os._exit(3)
        seed = fields["sampling_seed"]
        if not self.arguments.enable_deterministic_inference:
            seed = self.random.getrandbits(63)
        elif seed is None:
            seed = SEED_OF_REQUESTS_WITHOUT
        params = SamplingParams(
            temperature=fields["temperature"],
            top_k=fields["top_k"],
            top_p=fields["top_p"],
            min_p=fields["min_p"],
            repetition_penalty=fields["repetition_penalty"],
            max_tokens=fields["max_new_tokens"],
            stop_token_ids=() if fields["ignore_eos"] else tuple(fields["stop_token_ids"]),
            seed=seed,
            log_probs="raw",
        )
        with self.lock:
            number = next(self.numbers)
            self.arrived[number] = queue.SimpleQueue()
            self.number_of[name] = number
            self.num_served += 1
            request = GenerationRequest(request_id=name, prompt_ids=prompt, params=params)
            self.hosted.submit(number, request)
            self.running.add(number)
        return number

    def abort(self, name: str) -> None:
        with self.lock:
            if name in self.number_of:
                for other, number in self.number_of.items():
                    if other.startswith(name) and number in self.running:
                        self.hosted.abort(number)

    def end(self, name: str) -> None:
        with self.lock:
            self.arrived.pop(self.number_of.pop(name))

    def update(self, folder: Path, version: str) -> None:
        tensors = {
            k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()
        }
        if self.arguments.fault == "refuse_weights":
            raise ValueError("this server refuses weights")
        if self.arguments.fault == "withhold":
            return
        with self.lock:
            if self.arguments.fault != "pretend":
                self.hosted.load_weights(tensors.items())
            self.weight_version = version

    def load_adapter(self, name: str, folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        with self.lock:
            for key, low in tensors.items():
                if key.endswith(".lora_A.weight"):
                    high = tensors[key.replace("lora_A", "lora_B")]
                    layer = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                    weight = self.parameters[f"{layer}.weight"]
                    self.base[layer] = weight.data.clone()
                    weight.data.add_(high @ low * (config["lora_alpha"] / config["r"]))
            self.adapter = name

    def unload_adapter(self) -> None:
        with self.lock:
            for layer, weight in self.base.items():
                self.parameters[f"{layer}.weight"].data.copy_(weight)
            self.base, self.adapter = {}, None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine
    api_key: str

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self.is_allowed():
            return
        engine = self.engine
        if self.path == "/health":
            self.answer(200, "")
        elif self.path == "/server_info":
            facts = {
                name: value
                for name, value in vars(engine.arguments).items()
                if name not in ("config", "api_key")
            }
            state = {"num_flushes": engine.num_flushes, "num_served": engine.num_served}
            state["released"] = sorted(engine.released)
            self.answer(200, {**facts, "version": "0.5.23", "internal_states": [state]})
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.is_allowed():
            path = self.path.partition("?")[0].removeprefix("/")
            try:
                getattr(self, path)(body)
            except (ValueError, KeyError) as error:
                self.answer(400, {"success": False, "message": repr(error)})

    def is_allowed(self) -> bool:
        allowed = self.path == "/health" or (
            self.headers["Authorization"] == f"Bearer {self.api_key}"
        )
        if not allowed:
            self.answer(401, {"error": "Unauthorized"})
        return allowed

    def generate(self, body: dict[str, Any]) -> None:
        assert body["stream"]
        assert body["return_logprob"]
        if self.engine.released:
            raise ValueError(f"memory is released: {self.engine.released}")
        if body.get("lora_path", [self.engine.adapter])[0] != self.engine.adapter:
            raise ValueError("another adapter is loaded")
        names = body["rid"]
        each = zip(names, body["input_ids"], body["sampling_params"], strict=True)
        numbers = [self.engine.submit(*sample) for sample in each]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for message in self.messages(names, body["input_ids"], numbers):
            self.chunk(b"data: " + json.dumps(message).encode() + b"\n\n")
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")
        for name in names:
            self.engine.end(name)

    def messages(
        self, names: list[str], prompts: list[list[int]], numbers: list[int]
    ) -> Iterator[dict[str, Any]]:
        running = dict(enumerate(numbers))
        while running:
            for index, number in list(running.items()):
                try:
                    delta = self.engine.arrived[number].get(timeout=0.002)
                except queue.Empty:
                    continue
                if delta.stop_reason:
                    del running[index]
                values = zip(delta.log_probs, delta.token_ids, strict=True)
                yield {
                    "output_ids": list(delta.token_ids),
                    "meta_info": {
                        "id": names[index],
                        "finish_reason": {"type": delta.stop_reason} if delta.stop_reason else None,
                        "prompt_tokens": len(prompts[index]),
                        "weight_version": self.engine.weight_version,
                        "output_token_logprobs": [[v, token, None] for v, token in values],
                    },
                    "index": index,
                }

    def abort_request(self, body: dict[str, Any]) -> None:
        self.engine.abort(body["rid"])
        self.answer(200, "")

    def flush_cache(self, body: dict[str, Any]) -> None:
        if self.engine.hosted.has_work():
            raise ValueError("requests are running")
        self.engine.num_flushes += 1
        self.answer(200, "Cache flushed.\n")

    def update_weights_from_disk(self, body: dict[str, Any]) -> None:
        assert body["load_format"] == "safetensors"
        if "weights" in self.engine.released:
            raise ValueError("the memory of the weights is released")
        self.engine.update(Path(body["model_path"]), body["weight_version"])
        self.answer(200, {"success": True, "message": ""})

    def load_lora_adapter(self, body: dict[str, Any]) -> None:
        if self.engine.adapter is not None:
            raise ValueError("an adapter is loaded")
        self.engine.load_adapter(body["lora_name"], Path(body["lora_path"]))
        self.answer(200, {"success": True})

    def unload_lora_adapter(self, body: dict[str, Any]) -> None:
        assert body["lora_name"] == self.engine.adapter
        self.engine.unload_adapter()
        self.answer(200, {"success": True})

    def release_memory_occupation(self, body: dict[str, Any]) -> None:
        self.engine.released |= set(body["tags"])
        if "weights" in body["tags"]:
            for parameter in self.engine.parameters.values():
                parameter.data.zero_()  # whatever was there is gone
        self.answer(200, None)

    def resume_memory_occupation(self, body: dict[str, Any]) -> None:
        for tag in body["tags"]:
            self.engine.released.remove(tag)
        self.answer(200, None)

    def answer(self, status: int, content: Any) -> None:
        is_text = isinstance(content, str)
        payload = (content if is_text else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def chunk(self, payload: bytes) -> None:
        self.wfile.write(f"{len(payload):x}\r\n".encode() + payload + b"\r\n")


class Server(ThreadingHTTPServer):
    request_queue_size = 1024  # the default refuses connections that come at the same time


def main() -> None:
    arguments = parse()
    Handler.api_key = json.loads(Path(arguments.config).read_text())["api-key"]
    print("a line that the server writes", file=sys.stderr)
    Handler.engine = Engine(arguments)
    Server((arguments.host, arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
