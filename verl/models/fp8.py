"""Linear layers in fp8 for generation, beside the weights that are trained.

    y[r, o] = x_scale[r] w_scale[o] sum over i of x8[r, i] w8[o, i]       x8, w8 in e4m3

Every row of the input and every output of the weight has a scale of its own: its largest magnitude
becomes 448, the largest number of e4m3. Weights are quantized from their bf16 rounding, which is
what training computes with, after each update, into memory that stays where it is (graphs remember
addresses). Only passes of the rollout engine use them (`routing.is_generating`); training goes on
with the module's own weights.

Before first use a probe runs some tokens through the model and compares the output of each layer
with the unquantized one. A layer whose relative error is above the budget stays as it is. `audit`
lists every layer with its format, its error and the reason.

Experts are quantized like linear layers, with a scale for every output of every expert; their
products are grouped (`verl.models.experts`). Output layer, embedding, norms and routers are not
quantized.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.models.experts import DOWN, GATED, UP, expert_modules, grouped_product, local_weight
from verl.models.fuse import FusedAttention, FusedGate
from verl.models.joined_linears import JoinedLinears
from verl.models.kernels.availability import can_run_triton
from verl.models.routing import is_generating
from verl.utils.device import get_device_capability, get_torch_device

logger = logging.getLogger(__name__)

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
ERROR_BUDGET = 0.08
"""Relative error of a layer's output above which it stays in bf16. Rounding both operands to three
bits of mantissa gives about 0.04 where nothing is out of range."""

TILE = 16
"""Hardware products take inputs and outputs in multiples of this."""

PROBE_TOKENS = 64


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (n, k) as e4m3, and the scale of each row, (n, 1) in fp32."""
    if can_run_triton(x.device):
        from verl.models.kernels.quantize import quantize_rows as kernel  # noqa: PLC0415 - triton

        return kernel(x)
    return reference_quantize_rows(x)


def reference_quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    # By a tensor: on a GPU, torch divides by a number as a product with its rounded reciprocal.
    scale = scale / torch.full_like(scale, LARGEST)
    return (wide / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def fp8_product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., k) times a quantized weight (o, k) with scales (o, 1), in the dtype of x."""
    rows = x.flatten(0, -2)
    x8, x_scale = quantize_rows(rows)
    if x.device.type == "cuda":
        y = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            x8, weight.t(), scale_a=x_scale, scale_b=scale.t(), bias=bias,
            out_dtype=x.dtype, use_fast_accum=True,
        )  # fmt: skip
    else:
        y = F.linear(x8.float() * x_scale, weight.float() * scale).to(x.dtype)
        y = y if bias is None else y + bias
    return y.unflatten(0, x.shape[:-1])


def fp8_grouped_product(rows: Tensor, weight: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """Rows (S, k) of group e times weight[e] of (E, o, k) with scales (E, o, 1), in their dtype.

    Rows behind the last end are undefined.
    """
    x8, x_scale = quantize_rows(rows)
    if rows.device.type == "cuda":
        return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
            x8, weight.transpose(1, 2), x_scale.squeeze(1), scale.squeeze(2),
            offs=ends, out_dtype=rows.dtype, use_fast_accum=True,
        )  # fmt: skip
    wide = (weight.float() * scale).transpose(1, 2)
    return grouped_product(x8.float() * x_scale, wide, ends).to(rows.dtype)


class Fp8Weight(ABC):
    """A weight in e4m3 beside the one it is made from; `is_on` after a probe that it passed.

    `source` gives the weight that is trained, (..., outputs, inputs).
    """

    def __init__(self, name: str, parameters: list[str], source: Callable[[], Tensor]) -> None:
        self.name = name
        self.parameters = parameters
        """Names of the model's parameters that it stands for."""

        self.source = source
        weight = source()
        self.reason = "" if weight.is_meta else self.unfit(weight)
        self.is_on = not self.reason
        self.error: float | None = None
        self.is_filled = False
        self.is_probing = False
        if self.is_on:
            self.weight = torch.zeros(weight.shape, dtype=E4M3, device=weight.device)
            self.scale = torch.ones(*weight.shape[:-1], 1, device=weight.device)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes if self.is_on else 0

    @property
    def is_used(self) -> bool:
        """Whether the pass that runs on this thread takes it."""
        return self.is_on and self.is_filled and is_generating()

    @abstractmethod
    def unfit(self, weight: Tensor) -> str:
        """Why a weight cannot be quantized; empty if it can."""

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantize what bf16 keeps of the weight, in place."""
        if self.is_on:
            rows = self.source().to(torch.bfloat16).flatten(0, -2)
            weight, scale = quantize_rows(rows)
            self.weight.copy_(weight.view(self.weight.shape))
            self.scale.copy_(scale.view(self.scale.shape))
            self.is_filled = True

    def compare(self, y: Tensor, expected: Tensor) -> None:
        """Keep the largest relative error of an output that the probe has seen."""
        error = (y.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-12)
        self.error = max(self.error or 0.0, float(error))


class Fp8Matrix(Fp8Weight):
    """The weight of a linear layer, or of several that have one input."""

    def __init__(self, names: list[str], layer: nn.Linear | JoinedLinears) -> None:
        self._layer = layer
        parameters = [f"{name}.weight" for name in names]
        super().__init__(" + ".join(names), parameters, lambda: layer.weight.detach())

    def unfit(self, weight: Tensor) -> str:
        return unfit(weight, (8, 9))

    def __call__(self, x: Tensor) -> Tensor:
        y = fp8_product(x, self.weight, self.scale, self._layer.bias)
        if not self.is_probing:
            return y
        expected = F.linear(x, self.source(), self._layer.bias)
        self.compare(y, expected)
        return expected


class Fp8Experts(Fp8Weight):
    """One tensor of experts."""

    def __init__(self, name: str, experts: nn.Module, leaf: str) -> None:
        def source() -> Tensor:
            weight = local_weight(experts, leaf).detach()
            return weight.transpose(1, 2) if experts.is_transposed else weight

        super().__init__(name, [name], source)

    def unfit(self, weight: Tensor) -> str:
        if weight.device.type == "cuda" and weight.dtype != torch.bfloat16:
            return f"grouped fp8 products give bf16, and the model computes in {weight.dtype}"
        return unfit(weight[0], (9, 0))

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        y = fp8_grouped_product(rows, self.weight, self.scale, ends)
        if not self.is_probing:
            return y
        expected = grouped_product(rows, self.source().transpose(1, 2), ends)
        num_rows = int(ends[-1])  # those behind are another rank's
        if num_rows:
            self.compare(y[:num_rows], expected[:num_rows])
        return expected


def unfit(weight: Tensor, capability: tuple[int, int]) -> str:
    """Why a matrix cannot be quantized; empty if it can."""
    if any(size % TILE for size in weight.shape):
        return f"shape {tuple(weight.shape)} is not in multiples of {TILE}"
    is_cuda, index = weight.device.type == "cuda", weight.device.index or 0
    if is_cuda and get_device_capability(index) < capability:
        name = get_torch_device().get_device_name(index)
        needed = ".".join(map(str, capability))
        return f"{name} has no fp8 products for it (compute capability {needed} or newer)"
    return ""


class Fp8Forward:
    """The forward of a linear layer: quantized in the rollout engine's passes."""

    def __init__(self, module: nn.Linear, matrix: Fp8Matrix) -> None:
        self.own_forward = module.forward
        self.matrix = matrix

    def __call__(self, input: Tensor) -> Tensor:
        return self.matrix(input) if self.matrix.is_used else self.own_forward(input)


@dataclass(frozen=True)
class LayerFormat:
    """A line of the audit."""

    name: str
    format: str
    num_weights: int
    error: float | None
    reason: str


class Fp8Linears:
    """The linear layers and experts inside a model's body, quantized for generation."""

    def __init__(self, model: PreTrainedModel, budget: float = ERROR_BUDGET) -> None:
        self.model = model
        self.budget = budget
        self.matrices = list(install(model))
        self._is_probed = False

    @property
    def num_bytes(self) -> int:
        """Memory beside the weights that are trained."""
        return sum(matrix.num_bytes for matrix in self.matrices)

    def refresh(self, run_tokens: Callable[[Tensor], object]) -> None:
        """Follow the weights; the first time, probe every layer with `run_tokens(ids)`."""
        for matrix in self.matrices:
            matrix.refresh()
        if not self._is_probed:
            self._probe(run_tokens)

    def _probe(self, run_tokens: Callable[[Tensor], object]) -> None:
        self._is_probed = True
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (PROBE_TOKENS,), generator=generator)
        on = [matrix for matrix in self.matrices if matrix.is_on]
        for matrix in on:
            matrix.is_probing = True
        try:
            run_tokens(ids.to(self.model.device))
        finally:
            for matrix in on:
                matrix.is_probing = False
        for matrix in on:
            if matrix.error is None:
                matrix.is_on, matrix.reason = False, "the probe did not reach it"
            elif not matrix.error <= self.budget:
                text = f"its output is off by {matrix.error:.3f}, more than {self.budget}"
                matrix.is_on, matrix.reason = False, text
        self._log()

    def _log(self) -> None:
        lines = self.audit()
        in_fp8 = sum(line.num_weights for line in lines if line.format == "fp8")
        total = sum(line.num_weights for line in lines)
        logger.info("fp8 rollout: %.1f%% of all weights\n%s", 100 * in_fp8 / total, table(lines))
        for line in lines:
            if line.reason and line.format != "fp8" and line.error is not None:
                logger.warning(
                    "fp8 rollout: %s stays in %s: %s", line.name, line.format, line.reason
                )

    def audit(self) -> list[LayerFormat]:
        """Every matrix of the model with its format."""
        lines, covered = [], set[str]()
        for matrix in self.matrices:
            source = matrix.source()
            name = "fp8" if matrix.is_on else str(source.dtype).removeprefix("torch.")
            lines.append(
                LayerFormat(matrix.name, name, source.numel(), matrix.error, matrix.reason)
            )
            covered.update(matrix.parameters)
        for name, parameter in self.model.named_parameters():
            if name.replace("base_layer.", "") not in covered and parameter.dim() > 1:
                dtype = str(parameter.dtype).removeprefix("torch.")
                kind = "not a linear layer of the body"
                lines.append(LayerFormat(name, dtype, parameter.numel(), None, kind))
        return lines


def table(lines: list[LayerFormat]) -> str:
    """The audit as text."""
    width = max(len(line.name) for line in lines)
    rows = []
    for line in lines:
        error = "" if line.error is None else f"{line.error:.4f}"
        rows.append(f"  {line.name:{width}}  {line.format:9} {error:>7}  {line.reason}".rstrip())
    return "\n".join(rows)


def install(model: PreTrainedModel) -> Iterator[Fp8Weight]:
    """Give every linear layer of the body its matrix; layers of one input have one together."""
    names = {module: name for name, module in model.named_modules()}
    joined: set[nn.Module] = set()
    for module in model.modules():
        forward = module.forward
        if isinstance(forward, FusedGate | FusedAttention) and forward.joined is not None:
            linears = forward.joined
            if linears.is_whole:
                parts = [names[linear] for linear in linears.linears]
                linears.low_precision = matrix = Fp8Matrix(parts, linears)
                joined.update(linears.linears)
                yield matrix
    head = model.get_output_embeddings()
    for module, name in names.items():
        if type(module) is nn.Linear and module is not head and module not in joined:
            if not is_body(name):
                continue
            matrix = Fp8Matrix([name], module)
            module.forward = Fp8Forward(module, matrix)
            yield matrix
    for name, experts in expert_modules(model).items():
        weights = {
            leaf: Fp8Experts(f"{name}.{leaf}", experts, leaf)
            for leaf in (GATED, UP, DOWN)
            if leaf in experts._parameters
        }
        vars(experts)["low_precision"] = weights
        yield from weights.values()


def is_body(name: str) -> bool:
    """Adapters are small and change often; towers for images have their own arithmetic."""
    return not any(part in name for part in ("lora_", "visual.", "vision_tower."))
