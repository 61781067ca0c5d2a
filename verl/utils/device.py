"""Which kind of device this process computes on, and what that device calls things.

One name decides everything: `get_device_name()` is "cuda", "npu" or "cpu", found on the machine or
forced with `VERL_FORCE_DEVICE`. The rest follows from it: the torch module, the collective
back-end, the variable that hides devices, memory, random numbers. AMD's GPUs are "cuda" too, as in
torch. A device that was asked for and is not there is refused, never replaced by another.

Other modules ask here and name no kind of device. Exceptions are what exists for one kind only:
kernels, CUDA graphs, the CUDA driver's own memory calls, NVIDIA's and Ascend's profilers.

Two settings of the whole process live here too, because the device pays for them: deterministic
kernels, and rare garbage collection (a full collection visits every object of the process, a third
of a second with torch and a model loaded, while the device idles).
"""

import gc
import importlib.util
import logging
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.utils.environment import forced_device, is_set, set_variable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kind:
    """What one kind of device calls things."""

    collectives: str
    """The back-end of its process groups."""

    visible_devices: str
    """The environment variable that says which devices a process may use."""

    ray_resource: str | None
    """What Ray counts it as."""


KINDS = {
    "cuda": Kind("nccl", "CUDA_VISIBLE_DEVICES", "GPU"),
    "npu": Kind("hccl", "ASCEND_RT_VISIBLE_DEVICES", "NPU"),
    "cpu": Kind("gloo", "CUDA_VISIBLE_DEVICES", None),
}
DEVICES = tuple(KINDS)

STAND_INS: dict[str, Any] = {}
"""Objects to use instead of `torch.<kind>`, by kind, for a device that this torch lacks."""


def _npu_is_available() -> bool:
    if importlib.util.find_spec("torch_npu") is None:  # with it installed, torch loads it by itself
        return False
    return torch.get_device_module("npu").is_available()


is_cuda_available: bool = torch.cuda.is_available()
is_npu_available: bool = _npu_is_available()


def get_device_name() -> str:
    """ "cuda", "npu" or "cpu": what `VERL_FORCE_DEVICE` says, else the best this machine has."""
    forced = forced_device()
    if forced:
        if forced not in DEVICES:
            raise ValueError(
                f"VERL_FORCE_DEVICE is {forced!r}; it must be one of: {', '.join(DEVICES)}"
            )
        return forced
    if is_cuda_available:
        return "cuda"
    return "npu" if is_npu_available else "cpu"


def resolve_device(requested: str | None = "auto") -> str:
    """The device type for what a user wrote: "auto" (or None) finds it, a name must be present."""
    if requested is None or requested == "auto":
        return get_device_name()
    if requested not in DEVICES:
        raise ValueError(f"device is {requested!r}; it must be one of: auto, {', '.join(DEVICES)}")
    present = {"cuda": is_cuda_available, "npu": is_npu_available, "cpu": True}
    if not present[requested]:
        raise ValueError(
            f"device {requested!r} was asked for, but torch {torch.__version__} sees none on this "
            "machine. Set trainer.device=auto or cpu to run without it; if there is one, check "
            f"{KINDS[requested].visible_devices}, the driver, and that torch was built for it"
        )
    return requested


def auto_set_device(config: Any) -> None:
    """Settle `config.trainer.device` in place: "auto" or nothing becomes what the machine has.

    "cuda", the name most scripts carry, becomes "npu" on a machine that has NPUs and no CUDA.
    """
    requested = config.trainer.device
    if requested == "cuda" and is_npu_available and not is_cuda_available:
        resolved = "npu"
    elif requested is None or requested == "auto":
        resolved = get_device_name()
    else:
        return
    logger.info("trainer.device: %s -> %s", requested, resolved)
    config.trainer.device = resolved


auto_set_ascend_device_name = auto_set_device


def torch_module_of(kind: str) -> Any:
    """`torch.cuda`, `torch.npu` or `torch.cpu`, whichever device this process runs on."""
    return STAND_INS[kind] if kind in STAND_INS else torch.get_device_module(kind)


def get_torch_device() -> Any:
    """`torch.cuda`, `torch.npu` or `torch.cpu`."""
    return torch_module_of(get_device_name())


def get_device_id() -> int:
    """Index of the current device; the CPU is device 0."""
    return 0 if get_device_name() == "cpu" else get_torch_device().current_device()


def get_nccl_backend() -> str:
    """The collective back-end of the device: "nccl", "hccl" or, on a CPU, "gloo"."""
    return KINDS[get_device_name()].collectives


def get_visible_devices_keyword() -> str:
    """The environment variable that says which devices a process may use."""
    return KINDS[get_device_name()].visible_devices


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was told; a CPU always has."""
    if device.type != "cpu":
        torch_module_of(device.type).synchronize(device)


def without_waiting(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on `device`. A copy to a GPU starts from pinned memory, so the host goes on."""
    is_copied_to_gpu = device.type == "cuda" and tensor.device.type == "cpu"
    if is_copied_to_gpu:
        tensor = tensor.contiguous().pin_memory()  # rows that share memory cannot be pinned
    return tensor.to(device, non_blocking=is_copied_to_gpu)


def memory_info(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of an accelerator, whoever holds the rest."""
    return torch_module_of(device.type).mem_get_info(device)


def peak_memory() -> tuple[int, int] | None:
    """The most bytes that tensors took, and that torch held; None on a CPU, where nobody counts."""
    if get_device_name() == "cpu":
        return None
    module = get_torch_device()
    return module.max_memory_allocated(), module.max_memory_reserved()


def exempt_from_collection() -> None:
    """Let later garbage collections pass over what is alive now: code, classes, models.

    There are half a million such objects, and `free_cached_memory` would look at each of them, for
    tenths of a second. A CPU's collections are left as they are.
    """
    if get_device_name() != "cpu":
        gc.collect()
        gc.freeze()


def collect_all_again() -> None:
    """Undo `exempt_from_collection`: what a run has left is found by the next collection."""
    if get_device_name() != "cpu":
        gc.unfreeze()


def free_cached_memory() -> None:
    """Give back to the device what nothing refers to, cycles included. A CPU keeps nothing."""
    if get_device_name() != "cpu":
        gc.collect()
        get_torch_device().empty_cache()


def seed_everything(seed: int) -> None:
    """Set the generators that algorithms and users' code draw from: torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def rng_states() -> list[Tensor]:
    """The random state of each visible device; none before the process has used one."""
    module = get_torch_device()
    if get_device_name() == "cpu" or not module.is_initialized():
        return []
    return module.get_rng_state_all()


def set_rng_states(kind: str, states: list[Tensor]) -> None:
    """Continue the random numbers of the devices of a kind where `rng_states` was called."""
    visible = torch_module_of(kind).device_count()
    if visible != len(states):
        raise ValueError(
            f"the random state of {len(states)} {kind.upper()} devices was saved and {visible} are "
            "visible; resume with the same number of devices"
        )
    torch_module_of(kind).set_rng_state_all(states)


def get_device_capability(device_id: int = 0) -> tuple[int | None, int | None]:
    """CUDA compute capability (major, minor); (None, None) on other devices."""
    if get_device_name() != "cuda":
        return None, None
    return get_torch_device().get_device_capability(device_id)


def set_expandable_segments(enable: bool) -> None:
    """Let the CUDA allocator grow segments in place (less fragmentation); CUDA only."""
    if get_device_name() == "cuda":
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{enable}")


_BF16_PROBE = """
import torch
a = torch.ones(256, 256, dtype=torch.bfloat16)
assert (a @ a)[0, 0].item() == 256
"""
_BF16_PROBE_SECONDS = 120.0


def check_cpu_bf16() -> None:
    """Raise if bfloat16 matrix products kill a process on this CPU, and say what helps.

    Some virtual machines advertise matrix instructions (AMX) that they cannot run: the process
    dies with SIGILL. So the product is tried in a child process, once per process and run.
    """
    code, complaint = _probe_cpu_bf16()
    if code == 0:
        return
    died = f"signal {-code}" if code < 0 else f"exit code {code}"
    raise RuntimeError(
        f"a bfloat16 matrix product on this CPU ended a test process with {died}. Use float32, or "
        "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 in the environment before Python starts "
        f"(it must be set before torch is imported). {complaint}".rstrip()
    )


@cache
def _probe_cpu_bf16() -> tuple[int, str]:
    probe = subprocess.run(
        [sys.executable, "-c", _BF16_PROBE],
        capture_output=True,
        text=True,
        timeout=_BF16_PROBE_SECONDS,
        check=False,
    )
    return probe.returncode, probe.stderr.strip()[-500:]


def use_deterministic_kernels() -> None:
    """Use kernels that always give the same bits, in the whole process; torch refuses, by name,
    operations that have none."""
    if not is_set("CUBLAS_WORKSPACE_CONFIG"):
        set_variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or torch refuses products
    torch.use_deterministic_algorithms(True)
    # A help for finding reads of what nobody has written; it slows everything down.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - untyped


NEW_OBJECTS = 20_000
"""Python looks for garbage when this many more objects have been made than given up. Its own number
is 700, which a decode step of a thousand rows passes several times. Every hundredth look is a full
one, so with this number there is one in many steps."""


def collect_seldom() -> None:
    """Collect garbage only after many new objects, in the whole process from now on."""
    first, *others = gc.get_threshold()
    gc.set_threshold(max(first, NEW_OBJECTS), *others)


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """`collect_seldom` while the context lasts."""
    before = gc.get_threshold()
    collect_seldom()
    try:
        yield
    finally:
        gc.set_threshold(*before)
