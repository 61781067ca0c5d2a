"""Residency: which tensors are on the device, and which are offloaded to CPU memory meanwhile.

Three kinds are offloaded at different times: activations between the forward and the backward pass,
the optimizer's state between steps, weights that nobody shares between calls. A tensor keeps its
identity (an optimizer or a module goes on referring to it) and changes its storage; nothing is
rounded. On CUDA the CPU side is pinned and kept for the next time, so that copies run at full speed
and are not allocated again. On a CPU the same copies are made; they save nothing there.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from verl.models.fuse import CompiledLayers
from verl.models.kernels.availability import can_run_triton
from verl.utils.device import synchronize
from verl.workers.engine.memory import MemoryOptions

SMALL_ACTIVATION = 1 << 14
"""Elements. Smaller tensors (masks, statistics of norms) are not worth a copy."""


class Residency:
    """Where an engine's weights and activations are while it computes, and what is compiled."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        options: MemoryOptions,
        *,
        can_compile: bool,
    ) -> None:
        self.weights: OffloadedWeights | None = None
        self.compiled: CompiledLayers | None = None
        self.activations: OffloadedActivations | None = None
        if options.activation_offload:
            self.activations = OffloadedActivations(module)
        if options.param_offload:
            self.weights = OffloadedWeights(module, device)
        is_gpu = device.type == "cuda" and can_run_triton(device)
        if options.use_torch_compile and is_gpu and can_compile:
            self.compiled = CompiledLayers(module)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Weights are on the device and compiled layers are active while the context lasts."""
        with ExitStack() as stack:
            if self.weights is not None:
                stack.enter_context(self.weights.on_device())
            if self.compiled is not None:
                stack.enter_context(self.compiled.on())
            yield

    def during_forward(self) -> AbstractContextManager[object]:
        """Surrounds the forward pass and the loss of a micro-batch."""
        return nullcontext() if self.activations is None else self.activations.during_forward()


class HostMemory:
    """CPU buffers, one for each key; `put` fills the key's buffer and gives it back."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    def put(self, key: Hashable, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[key] = host_buffer(tensor)
        if buffer.data_ptr() != tensor.data_ptr():
            buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        return buffer


class OffloadedWeights:
    """A model's weights in CPU memory, on the device only inside `on_device`.

    Those that share a storage (layers with one product, `joined_linears`) share one on both sides.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._parameters = list(module.parameters())  # tied weights once
        self._device = device
        move_storages(self._parameters, lambda storage: host_buffer(storage).copy_(storage))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        homes = [parameter.data for parameter in self._parameters]
        move_storages(self._parameters, lambda storage: device_copy(storage, self._device))
        try:
            yield
        finally:
            for parameter, home in zip(self._parameters, homes, strict=True):
                if parameter.requires_grad:  # a frozen weight is as it was
                    home.copy_(parameter.data)
                parameter.data = home


class OffloadedState:
    """An optimizer's masters and moments in CPU memory between steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Iterable[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._masters = list(masters)
        """Those that are the optimizer's own; a model's fp32 weight is its own master and stays."""
        self._device = next(iter(optimizer.param_groups[0]["params"])).device
        self._host = HostMemory()
        self._to_host()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        for master in self._masters:
            master.data = device_copy(master.data, self._device)
        for _, name, state in self._moments():
            state[name] = device_copy(state[name], self._device)
        try:
            yield
        finally:
            self._to_host()

    def _to_host(self) -> None:
        for index, master in enumerate(self._masters):
            master.data = self._host.put(index, master.data)
        for index, name, state in self._moments():
            state[name] = self._host.put((index, name), state[name])
        wait_for_copies(self._device)

    def _moments(self) -> Iterator[tuple[int, str, dict[str, Tensor]]]:
        """What the optimizer keeps for every element; counters stay where they are."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            state = self._optimizer.state.get(parameter, {})
            for name, value in list(state.items()):
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                    yield index, name, state


class OffloadedActivations:
    """Keeps what the backward pass needs in CPU memory, weights excepted: they stay anyway."""

    def __init__(self, module: nn.Module, min_elements: int = SMALL_ACTIVATION) -> None:
        self._module = module
        self._min_elements = min_elements

    def during_forward(self) -> saved_tensors_hooks:
        """Surrounds the forward pass and the loss; the backward pass may run outside."""
        weights = {p.untyped_storage().data_ptr() for p in self._module.parameters()}

        def pack(tensor: Tensor) -> tuple[torch.device | None, Tensor]:
            if tensor.numel() >= self._min_elements and is_movable(tensor, weights):
                buffer = host_buffer(tensor)
                buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
                return tensor.device, buffer
            return None, tensor

        def unpack(packed: tuple[torch.device | None, Tensor]) -> Tensor:
            device, tensor = packed
            return tensor if device is None else device_copy(tensor, device)

        return saved_tensors_hooks(pack, unpack)


def move_storages(parameters: Iterable[nn.Parameter], copy: Callable[[Tensor], Tensor]) -> None:
    """Give the parameters what `copy` makes of their storages, each of which it gets once, as
    bytes. Views of one storage stay that."""
    copies: dict[int, Tensor] = {}  # by the address of the old storage
    for parameter in parameters:
        storage = parameter.untyped_storage()
        if storage.data_ptr() not in copies:
            content = torch.empty(0, dtype=torch.uint8, device=parameter.device).set_(storage)
            copies[storage.data_ptr()] = copy(content)
        moved = copies[storage.data_ptr()]
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=moved.device).set_(
            moved.untyped_storage(),
            parameter.storage_offset(),
            parameter.shape,
            parameter.stride(),
        )


def is_movable(tensor: Tensor, weights: Set[int]) -> bool:
    is_plain = tensor.layout == torch.strided
    return is_plain and tensor.untyped_storage().data_ptr() not in weights


def host_buffer(tensor: Tensor) -> Tensor:
    """CPU memory of the tensor's shape, dtype and strides; pinned when the tensor is on CUDA."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def device_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, also where the device is the CPU."""
    return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=tensor.is_pinned())


def wait_for_copies(device: torch.device) -> None:
    """Wait until the CPU side may be read and the device's side reused."""
    synchronize(device)
