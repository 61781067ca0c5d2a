"""Linear layers with one input computed as one product: q, k and v, or gate and up.

    one storage   [ q weight | k weight | v weight ]      the layers' weights are views of it

The layers stay in the model under their names, with their own parameters and gradients; a
checkpoint or an optimizer sees no difference. Only the product is one, and so is each product of
the backward pass. Where the views are gone (a sharded engine moved the weights, an adapter took a
layer's place), every layer computes its own part again. Nothing but the layers refers to the
storage, so whoever moves it (weights that wait in CPU memory) frees it, and may bring it back.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LowPrecision(Protocol):
    """The same product in another number format, for some passes (`fp8`)."""

    @property
    def is_used(self) -> bool: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class JoinedLinears:
    """Plain `nn.Linear` layers of one input, their weights moved into one storage."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        assert can_join(linears)
        self.linears = list(linears)
        self.sizes = [linear.out_features for linear in linears]
        self.shape = (sum(self.sizes), linears[0].in_features)
        _join([linear.weight for linear in linears])
        if linears[0].bias is not None:
            _join([linear.bias for linear in linears])
        self._pending: tuple[Tensor, tuple[Tensor, ...]] | None = None
        self.low_precision: LowPrecision | None = None

    def install(self) -> None:
        """Let a call of the first layer compute for all; the others take what is theirs."""
        for index, linear in enumerate(self.linears):
            linear.forward = _Member(self, index)

    def forget(self) -> None:
        """Drop what the first layer has computed for the others, when a pass will not ask for it.

        It would keep the whole graph behind it in memory.
        """
        self._pending = None

    @property
    def is_whole(self) -> bool:
        """Whether weights and biases lie in one storage each, one layer's behind the other's."""
        if not _are_joined([linear.weight for linear in self.linears]):
            return False
        return self.linears[0].bias is None or _are_joined([x.bias for x in self.linears])

    @property
    def weight(self) -> Tensor:
        """The weights of all layers, (sum of sizes, in_features), while `is_whole`."""
        return self.linears[0].weight.detach().as_strided(self.shape, (self.shape[1], 1))

    @property
    def bias(self) -> Tensor | None:
        """The biases of all layers, (sum of sizes), while `is_whole`."""
        first = self.linears[0].bias
        return None if first is None else first.detach().as_strided(self.shape[:1], (1,))

    def product(self, x: Tensor) -> Tensor:
        """The outputs of all layers side by side, (..., sum of sizes)."""
        if self.low_precision is not None and self.low_precision.is_used:
            return self.low_precision(x)
        weight, bias = self.weight, self.bias
        if not torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        parameters = [linear.weight for linear in self.linears]
        if bias is not None:
            parameters += [linear.bias for linear in self.linears]
        return _JoinedProduct.apply(  # pyright: ignore[reportReturnType]
            x, weight, bias, self.sizes, *parameters
        )

    def part(self, index: int, x: Tensor) -> Tensor:
        """What layer `index` gives for x; the layers are asked one after the other."""
        pending, linear = self._pending, self.linears[index]
        if index == 0 and self.is_whole:
            parts = self.product(x).split(self.sizes, -1)
            self._pending = (x, parts)
            return parts[0]
        if index and pending is not None and pending[0] is x:
            if index == len(self.linears) - 1:
                self._pending = None
            return pending[1][index]
        return F.linear(x, linear.weight, linear.bias)


class _Member:
    def __init__(self, joined: JoinedLinears, index: int) -> None:
        self.joined = joined
        self.index = index

    def __call__(self, input: Tensor) -> Tensor:
        return self.joined.part(self.index, input)


def can_join(linears: Sequence[nn.Module]) -> bool:
    """Whether they are plain linear layers of one shape of input, dtype and kind of bias."""
    if not all(type(linear) is nn.Linear for linear in linears):
        return False
    plain = [linear for linear in linears if isinstance(linear, nn.Linear)]
    kinds = {(x.in_features, x.weight.dtype, x.weight.device, x.bias is None) for x in plain}
    return len(kinds) == 1


def _join(parameters: Sequence[Tensor]) -> None:
    """Copy them into one storage; each becomes a view of its rows."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, rows in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = rows


def _are_joined(parameters: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before it ends, in the same storage."""
    if not all(type(parameter) is nn.Parameter for parameter in parameters):
        return False
    storage, address = parameters[0].untyped_storage().data_ptr(), parameters[0].data_ptr()
    for parameter in parameters:
        # Neighbours in memory need not share a storage: an allocator lays others side by side.
        is_next = parameter.data_ptr() == address
        if not is_next or parameter.untyped_storage().data_ptr() != storage:
            return False
        address += parameter.nbytes
    return True


class _JoinedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sizes: list[int],
        *parameters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes, ctx.num_parameters = sizes, len(parameters)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = gradients[0]
        rows, needs = grad.reshape(-1, grad.shape[-1]), ctx.needs_input_grad
        grad_x = grad @ weight if needs[0] else None
        found: list[Tensor | None] = [None] * ctx.num_parameters
        num_layers = len(ctx.sizes)
        if any(needs[4 : 4 + num_layers]):
            found[:num_layers] = (rows.t() @ x.reshape(-1, x.shape[-1])).split(ctx.sizes)
        if any(needs[4 + num_layers :]):
            found[num_layers:] = rows.sum(0).split(ctx.sizes)
        return grad_x, None, None, None, *found
