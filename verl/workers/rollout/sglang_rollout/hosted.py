"""SGLang as a `HostedEngine`: its server is our child, and this speaks its native endpoints.

    host loop --> SGLangEngine --HTTP on loopback--> sglang.launch_server --> its ranks
                    streams     /generate, /abort_request
                    weights     files in memory, /update_weights_from_disk, /load_lora_adapter
                    memory      /release_memory_occupation, /resume_memory_occupation, /flush_cache

A server that dies, stays silent, or answers what this protocol does not expect ends the engine's
process: whoever waits hears of it, and the next process holds no weights until some are sent.

Tensors on their way into SGLang's server: private files in memory, and LoRA adapters.

SGLang's ways for tensors inside a request carry pickles, so weights go through safetensors files in
a private folder on `/dev/shm`, and each rank of the server maps them from there. The folder is gone
when the server has read it; until then it takes the size of the model once. The writer holds a lock
in it, so what a killed process left behind is recognised and removed.

An adapter's tensors go into such a folder in peft's format, which the server loads under a new
name; the old adapter is unloaded before, so no request can meet it.
"""

import fcntl
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from verl.utils.environment import set_variable, variable
from verl.workers.rollout.adapter_names import in_peft_format, without_adapters
from verl.workers.rollout.base import GenerationRequest, TokenDelta
from verl.workers.rollout.native.sequence import EngineLimits, refuse_what_cannot_run
from verl.workers.rollout.process.hosted import EngineFacts, HostedEngine
from verl.workers.rollout.sglang_rollout.arguments import (
    FIXED,
    generate_body,
    refuse_what_the_server_did_not_take,
    server_arguments,
)
from verl.workers.rollout.sglang_rollout.server import (
    Server,
    ServerClient,
    ServerRefusedError,
    ready_server,
)
from verl.workers.rollout.sglang_rollout.streams import Streams

UPDATE_SECONDS = 600.0
SETTLE_SECONDS = 30.0
WEIGHTS, KV_CACHE = "weights", "kv_cache"


def build(options: Mapping[str, Any]) -> "SGLangEngine":
    """Called in the engine's process with what `sglang_options` made."""
    for name, value in options["environment"].items():
        set_variable(name, value)
    arguments = server_arguments(options["arguments"], options["engine_kwargs"])
    server = ready_server(options["command"], arguments, options["server"])
    in_effect = server.client.call("/server_info")
    refuse_what_the_server_did_not_take(options["engine_kwargs"], in_effect)
    return SGLangEngine(server, in_effect, options)


class SGLangEngine(HostedEngine):
    """Over a running server; `in_effect` is what that says of itself."""

    def __init__(
        self, server: Server, in_effect: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        self._server = server
        self._client = server.client
        self._in_effect = in_effect
        self._options = options
        self._streams = Streams(
            server,
            max_connections=options["server"]["max_connections"],
            max_silence_seconds=options["server"]["timeout"],
        )
        prompt_length = min(options["prompt_length"], options["max_model_len"] - 1)
        self._limits = EngineLimits(
            max_prompt_tokens=prompt_length,
            max_response_tokens=options["max_model_len"] - prompt_length,
        )
        self._adapter = (
            ServedAdapter(self._client, options["adapter"]) if options["adapter"] else None
        )
        self._fresh_seeds = Random(options["seed"])
        self._num_updates = int(FIXED["weight_version"])
        self._released: set[str] = set()

    def facts(self) -> EngineFacts:
        is_raw = variable("SGLANG_RETURN_ORIGINAL_LOGPROB").lower() in ("1", "true")
        return EngineFacts(
            name="sglang",
            version=self._in_effect["version"],
            log_probs="raw" if is_raw else "tempered",
            can_sleep=self._in_effect["enable_memory_saver"],
            max_model_len=self._options["max_model_len"],
        )

    # ---- requests ----------------------------------------------------------------------------

    def submit(self, number: int, request: GenerationRequest) -> None:
        # The server must never see what it cannot run: a token beyond the vocabulary ends it.
        refuse_what_cannot_run(
            request, self._limits, self._options["vocabulary"], can_decode_text=True
        )
        max_new_tokens = self._options["max_model_len"] - len(request.prompt_ids)
        body = generate_body(
            number,
            request,
            max_tokens=min(request.params.max_tokens, max_new_tokens),
            end_tokens=self._options["end_tokens"],
            fresh_seeds=self._fresh_seeds,
            adapter=None if self._adapter is None else self._adapter.name(),
        )
        self._streams.start(number, body, request, lambda ids: self._decode_text(ids))

    def abort(self, number: int) -> None:
        self._streams.abort(number)

    def has_work(self) -> bool:
        return self._streams.is_waited_for()

    def step(self) -> Sequence[tuple[int, TokenDelta]]:
        return self._streams.take(str(self._num_updates))

    @cached_property
    def _decode_text(self) -> Callable[[list[int]], str]:
        """Loaded for the first request that a text may end; most runs have none."""
        from transformers import AutoTokenizer  # noqa: PLC0415

        arguments = self._options["arguments"]
        tokenizer = AutoTokenizer.from_pretrained(
            arguments["model_path"], trust_remote_code=arguments["trust_remote_code"]
        )
        return lambda ids: str(tokenizer.decode(ids))

    # ---- weights and memory ------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._streams.settle(SETTLE_SECONDS)  # the host ends all requests before an update
        if self._adapter is None:
            self._load_base(weights)
        else:
            self._adapter.replace(weights)
        if self._released == {KV_CACHE} and self._options["multi_stage_wake_up"]:
            self._resume([KV_CACHE])  # the second stage of a wake-up
        self.forget_cache()

    def _load_base(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._num_updates += 1  # also if it fails: what the server then holds has no name
        with weight_folder(without_adapters(weights)) as folder:
            update = {
                "model_path": str(folder),
                "load_format": "safetensors",
                "weight_version": str(self._num_updates),
                "flush_cache": KV_CACHE not in self._released,
            }
            try:
                self._client.call("/update_weights_from_disk", update, seconds=UPDATE_SECONDS)
            except ServerRefusedError as refusal:
                raise ValueError(
                    f"SGLang did not take the weights, and what it holds now is unknown until it "
                    f"has taken all of them: {refusal}"
                ) from refusal

    def forget_cache(self) -> None:
        """SGLang clears its cache only when nothing runs, not even what was just aborted."""
        if KV_CACHE not in self._released:  # else it went with the memory
            self._streams.settle(SETTLE_SECONDS)
            path = f"/flush_cache?timeout={SETTLE_SECONDS:g}"
            self._client.call(path, {}, seconds=UPDATE_SECONDS)

    def sleep(self, level: int) -> None:
        wanted = [KV_CACHE] if level == 1 else [KV_CACHE, WEIGHTS]
        tags = [tag for tag in wanted if tag not in self._released]
        if tags:
            self.forget_cache()
            self._client.call("/release_memory_occupation", {"tags": tags}, seconds=UPDATE_SECONDS)
            self._released.update(tags)

    def wake_up(self) -> None:
        if WEIGHTS in self._released and self._options["multi_stage_wake_up"]:
            self._resume([WEIGHTS])  # keys and values follow when new weights have come
        else:
            self._resume(sorted(self._released))

    def _resume(self, tags: Sequence[str]) -> None:
        if tags:
            body = {"tags": list(tags)}
            self._client.call("/resume_memory_occupation", body, seconds=UPDATE_SECONDS)
            self._released.difference_update(tags)

    def close(self) -> None:
        self._server.close()


LOAD_SECONDS = 300.0


class ServedAdapter:
    """The adapter in use. `config` is peft's `adapter_config.json`."""

    def __init__(self, client: ServerClient, config: Mapping[str, Any]) -> None:
        self._client = client
        self._config = dict(config)
        self._in_use: str | None = None
        self._num_updates = 0

    def name(self) -> str:
        """What a request must carry to be answered with the adapter."""
        if self._in_use is None:
            raise ValueError("no adapter has been sent to this engine yet; send one first")
        return self._in_use

    def replace(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Use these tensors from now on; until all of them are loaded there is no adapter."""
        before, self._in_use = self._in_use, None
        if before is not None:
            self._client.call("/unload_lora_adapter", {"lora_name": before}, seconds=LOAD_SECONDS)
        self._num_updates += 1
        name = f"policy-{self._num_updates}"
        with weight_folder(in_peft_format(weights), file_bytes=sys.maxsize) as folder:
            (folder / "weights-00000.safetensors").rename(folder / "adapter_model.safetensors")
            (folder / "adapter_config.json").write_text(json.dumps(self._config))
            body = {"lora_name": name, "lora_path": str(folder)}
            try:
                self._client.call("/load_lora_adapter", body, seconds=LOAD_SECONDS)
            except ServerRefusedError as refusal:
                raise ValueError(f"SGLang did not take the adapter: {refusal}") from refusal
        self._in_use = name


MEMORY = Path("/dev/shm")
FILE_BYTES = 512 << 20
PREFIX, LOCK = "verl-weights-", "lock"


@contextmanager
def weight_folder(
    weights: Iterable[tuple[str, Tensor]], *, parent: Path = MEMORY, file_bytes: int = FILE_BYTES
) -> Iterator[Path]:
    """A folder with these tensors, for the length of a `with` block."""
    remove_left_over(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    with open(folder / LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            for index, tensors in enumerate(parts(weights, file_bytes)):
                write(tensors, folder / f"weights-{index:05d}.safetensors")
            yield folder
        finally:
            shutil.rmtree(folder)


def remove_left_over(parent: Path) -> None:
    """Folders whose lock nobody holds: their process was killed while it used them."""
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        try:
            with open(lock) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
        except (BlockingIOError, PermissionError, FileNotFoundError):
            continue  # in use, somebody else's, or gone meanwhile


def parts(weights: Iterable[tuple[str, Tensor]], file_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in portions of about so many bytes; their own memory may be used anew meanwhile."""
    part: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in weights:
        part[name] = tensor.detach().cpu().contiguous().clone()
        num_bytes += tensor.nbytes
        if num_bytes >= file_bytes:
            yield part
            part, num_bytes = {}, 0
    if part:
        yield part


def write(tensors: dict[str, Tensor], file: Path) -> None:
    needed = sum(tensor.nbytes for tensor in tensors.values())
    free = shutil.disk_usage(file.parent).free
    if needed > free:
        raise RuntimeError(
            f"the next {needed:,} bytes of the weights do not fit into {file.parent.parent}, which "
            f"has {free:,} bytes left; make it larger (for a container: --shm-size)"
        )
    save_file(tensors, file)
