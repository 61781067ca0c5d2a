"""Expert load and the auxiliary loss of routers, where ranks share out the tokens and the layers.

The formula is that of `verl.workers.engine.routes`, row by row. The loss is linear in it, so how
much a row's auxiliary loss weighs is known before the pass (`row_weights`), and each router adds
its own part to the gradient while it runs: on whatever pipeline stage, computed again or not.

    router   f, P of this rank's tokens -> sums over tensor and context ranks -> f . P, load
    column   sums over the layers of a stage -> over the stages
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from tensordict import TensorDict
from torch import Tensor

from verl.models.routing import Routing
from verl.utils.distributed import Group, all_reduce_
from verl.workers.engine.base import Columns, LossFunction
from verl.workers.engine.forward import rows_on_device
from verl.workers.engine.inputs import ModelInputs
from verl.workers.engine.routes import AUX_LOSS, probabilities


@dataclass
class Balance:
    """What the routers need to know of a micro-batch, and what they found; B rows."""

    routing: Routing
    rows: Tensor
    """(n,) the row of each token of this rank's routers that predicts a response token; else -1."""

    num_sources: Tensor
    """(B,) such tokens of each row, at least 1."""

    weights: Tensor | None
    """(B,) derivative of the loss by the auxiliary loss of each row; None without one."""

    aux_losses: dict[int, Tensor] = field(default_factory=dict)
    """(B,) of each layer that has run, by its number among the sparse layers."""

    counts: dict[int, Tensor] = field(default_factory=dict)
    """(experts,) tokens of each expert of these layers."""

    @classmethod
    def of(
        cls, routing: Routing, inputs: ModelInputs, weights: Tensor | None, tensor_group: Group
    ) -> "Balance":
        """`inputs` are those of this context rank; with sequence parallelism, which layers with
        experts have, each tensor rank has an equal share of its tokens."""
        num_rows, width = inputs.shape
        rows = torch.full_like(inputs.input_ids, -1)
        rows[inputs.sources] = inputs.own_index // width
        if tensor_group is not None and tensor_group.size() > 1:
            rows = rows.chunk(tensor_group.size())[tensor_group.rank()]
        num_sources = torch.bincount(inputs.index // width, minlength=num_rows).clamp_min(1)
        return cls(routing, rows, num_sources.float(), weights)

    def add(
        self, router: "BalancedRouter", logits: Tensor, probs: Tensor, routes: Tensor
    ) -> Tensor:
        """`probs` (n, experts) with the gradient of the layer's part of the auxiliary loss."""
        number = self._number(router)
        is_source = self.rows >= 0
        rows, layer = self.rows[is_source], self.routing.layers[number]
        scores = probabilities(logits, has_sigmoid=layer.has_sigmoid)
        chosen, mass = (self._row_means(rows, x[is_source]) for x in (routes.float(), scores))
        both = torch.stack([chosen, mass.detach()])
        if router.tp_cp_group.size() > 1:
            all_reduce_(both, group=router.tp_cp_group)
        chosen = both[0]  # of all tokens of each row
        if number not in self.counts:  # else it is computed again
            self.counts[number] = self.num_sources @ chosen
            self.aux_losses[number] = layer.num_experts * both.prod(0).sum(1)
        if self.weights is None:
            return probs
        weights = self.weights[:, None] * layer.num_experts / len(self.routing.layers)
        return MoEAuxLossAutoScaler.apply(probs, (weights * chosen * mass).sum())

    def _row_means(self, rows: Tensor, values: Tensor) -> Tensor:
        """(B, experts): sums over this rank's tokens, divided by the number of all."""
        sums = values.new_zeros(len(self.num_sources), values.shape[1])
        return sums.index_add(0, rows, values) / self.num_sources[:, None]

    def _number(self, router: "BalancedRouter") -> int:
        assert router.layer_number is not None, "counts from 1"
        layer = router.layer_number - 1
        return next(found.number for found in self.routing.layers if found.layer == layer)

    def total(self, group: Group = None) -> tuple[Tensor, Tensor]:
        """(B,) the auxiliary losses, and (layers, experts) the load, of the layers of all ranks of
        `group`, the stages of a pipeline."""
        num_layers = len(self.routing.layers)
        losses = self.num_sources.new_zeros(len(self.num_sources))
        load = losses.new_zeros(num_layers, self.routing.num_experts)
        for number, counts in self.counts.items():
            losses += self.aux_losses[number] / num_layers
            load[number] = counts
        if group is not None and group.size() > 1:
            all_reduce_(losses, group=group)
            all_reduce_(load, group=group)
        return losses, load


class BalancedRouter(TopKRouter):
    """megatron-core's router, whose routes are counted and balanced as ours are."""

    balance: Balance | None = None
    """Of the pass that runs."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        probs, routes = super().routing(logits, padding_mask=padding_mask)
        if self.balance is not None:
            flat = logits.view(-1, logits.shape[-1])
            probs = self.balance.add(self, flat, probs, routes)
        return probs, routes

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Counts nothing: the bias stays as it was loaded. megatron-core's own is compiled at the
        first call, which can hang in a forked process."""


def tell_router(layer: Any, arguments: Any, options: dict[str, Any]) -> None:
    """Forward hook of a layer with experts: which pass it is, also where it is computed again."""
    layer.mlp.router.balance = options["packed_seq_params"].balance


def row_weights(
    loss_function: LossFunction, rows: TensorDict, blank: Columns, device: torch.device
) -> Tensor:
    """(B,) derivative of the loss by the column of auxiliary losses, in which it is linear; `blank`
    has the other columns."""
    columns = {name: torch.zeros_like(column, device=device) for name, column in blank.items()}
    aux_loss = torch.zeros(len(rows), device=device, requires_grad=True)
    with torch.enable_grad():
        loss, _ = loss_function({**columns, AUX_LOSS: aux_loss}, rows_on_device(rows, device))
    if not loss.requires_grad:
        return torch.zeros_like(aux_loss)
    return torch.autograd.grad(loss, aux_loss)[0]
