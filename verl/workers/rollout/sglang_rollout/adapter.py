"""Tensors on their way into SGLang's server: private files in memory, and LoRA adapters.

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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from verl.workers.rollout.adapter_names import in_peft_format
from verl.workers.rollout.sglang_rollout.server import ServerClient, ServerRefusedError

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
