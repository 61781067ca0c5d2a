"""How well a role used its device, as the metric `perf/mfu/...`."""

from torch import nn

from verl.models.lora import has_lora
from verl.protocol import DataProto
from verl.utils.flops_counter import FlopsCounter


def update_passes(epochs: int, model: nn.Module) -> float:
    """What training over the rows costs, in passes.

    The gradients of the weights are a third of a pass; with adapters nearly all are left out.
    """
    return epochs * (2 / 3 if has_lora(model) else 1)


def utilisation(
    role: str, flops: FlopsCounter, data: DataProto, seconds: float, *, passes: float
) -> dict[str, float]:
    """The share of the device's peak that `passes` passes over the rows reached.

    A pass is forward and backward, forward alone a third. Empty where the peak is not known, as on
    a CPU.
    """
    lengths = data.batch["attention_mask"].sum(-1).tolist()
    share = flops.utilisation(lengths, seconds, passes=passes)
    return {} if share is None else {f"perf/mfu/{role}": share}
