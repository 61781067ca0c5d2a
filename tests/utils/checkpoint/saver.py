"""A process that saves checkpoints on request, so that a test can kill it in the middle.

It loads torch once and forks a child per save. The child says its process id, waits for a word (in
which time the test attaches strace), saves, says how each save ended and leaves. Words travel over
a socket, because `write` is among the calls that strace makes fail.
"""

import ctypes
import errno
import json
import os
import socket
import sys
from pathlib import Path

import torch

from verl.utils.checkpoint.layout import CheckpointSaveError
from verl.utils.checkpoint.store import CheckpointStore
from verl.utils.checkpoint.tensor_store import save_state

PR_SET_PTRACER = 0x59616D61


def contents(step, version):
    """What the step holds; two tensors of 40 bytes in a file each."""
    return {
        "step": step,
        "version": version,
        "moments": [torch.full((10,), float(step + version))] * 2,
    }


def save(store, step, version):
    with store.saving(step) as folder:
        save_state(folder / "actor", "optimizer", contents(step, version), max_shard_bytes=50)
        (folder / "data.json").write_text(f'{{"cursor": {step}}}')


def save_all(channel, root, steps, version):
    """Continue the run in `root` and save each step; an error ends that save, not the process."""
    store = CheckpointStore(Path(root), fingerprint={"run": {"name": "rig"}}, num_to_keep=1)
    store.resume()
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1))  # anyone may trace this process
    channel.send(json.dumps({"pid": os.getpid()}).encode())
    channel.recv(100)
    for step in steps:
        try:
            save(store, step, version)
            word = {"committed": step}
        except CheckpointSaveError as error:
            name = errno.errorcode[error.errno]
            word = {"failed": step, "errno": name, "file": error.filename, "text": str(error)}
        channel.send(json.dumps(word).encode())


def serve(channel):
    contents(0, 0)  # torch looks at the machine on first use; not in every child
    while request := channel.recv(1 << 16):
        child = os.fork()
        if child == 0:
            save_all(channel, **json.loads(request))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        channel.send(json.dumps({"status": status}).encode())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
