"""Tensors on their way into SGLang's server: files in memory that nobody else may read.

SGLang's ways for tensors inside a request carry pickles, so weights go through safetensors files in
a private folder on `/dev/shm`, and each rank of the server maps them from there. The folder is gone
when the server has read it; until then it takes the size of the model once. Whoever writes holds a
lock in it, so what a killed process left behind is recognised and removed.
"""

import fcntl
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

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
