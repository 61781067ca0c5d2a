"""Expert routes of a micro-batch: replayed, recorded, counted, balanced.

    column `routed_experts` (B, L, layers, k)  --pack-->  tokens (N, layers, k)  --> routers

A batch that has the column is replayed. Packing may compute a prompt once for several rows; its
tokens then have one route. Everything here is about models with experts; for others it is nothing.

Balance is looked at where a response token is predicted, row by row:

    f_e = 1/T sum over tokens of [e is among the token's experts]     P_e = 1/T sum of probabilities
    auxiliary loss of a row = mean over layers of E sum over e of f_e P_e      (arXiv:2101.03961)

A row is never split, so the loss does not depend on micro-batches, ranks or packing, which a loss
over the tokens of a micro-batch would.
"""

from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.models.routing import Routing
from verl.models.shared_prompts import SharedPrompts
from verl.models.ulysses import SequenceShard
from verl.utils.device import without_waiting
from verl.utils.distributed import Group, all_reduce_
from verl.workers.engine.base import BaseEngine, Columns
from verl.workers.engine.inputs import ModelInputs, prompt_owners

ROUTED_EXPERTS = "routed_experts"
"""(B, L, layers, k) the experts of every token, padding included; a column that need not be
there."""

AUX_LOSS = "router_aux_loss"
"""(B,) the auxiliary loss of each row."""

MISMATCHES = "router_mismatches"
"""(B,) share of the tokens and layers of a row whose router would have chosen other experts."""


@dataclass
class ExpertLoad:
    """How often each expert of each sparse layer was chosen since the last reading."""

    counts: Tensor | None = None
    """(layers, experts)"""

    layers: list[int] = field(default_factory=list)

    def add(self, selected: Tensor, routing: Routing) -> None:
        """Routes (tokens, layers, k)."""
        num_experts = routing.num_experts
        flat = selected.transpose(0, 1).flatten(1).long()  # (layers, tokens k)
        ones = torch.ones_like(flat, dtype=torch.float32)
        counts = torch.zeros(len(flat), num_experts, device=flat.device).scatter_add_(1, flat, ones)
        self.add_counts(counts, routing)

    def add_counts(self, counts: Tensor, routing: Routing) -> None:
        """How often each expert was chosen, (layers, experts)."""
        self.layers = [layer.layer for layer in routing.layers]
        self.counts = counts if self.counts is None else self.counts + counts


@dataclass
class RouteOptions:
    """What an engine does with the routes of a model with experts."""

    routing: Routing
    records: bool = False
    """Passes without gradients give the column `routed_experts`."""

    load: ExpertLoad = field(default_factory=ExpertLoad)
    """Over passes with gradients."""

    can_replay: bool = True
    """Whether the engine's routers take routes that are given."""

    must_agree: bool = False
    """Replayed routes are those that the routers choose themselves, as in exact mode."""

    @property
    def aux_loss_coef(self) -> float:
        return self.routing.aux_loss_coef

    def check(self, mismatches: float) -> None:
        """In exact mode routers choose as in the rollout, and replay only shows it."""
        if self.must_agree and mismatches > 0:
            raise RuntimeError(
                f"rollout.exact is True, but routers chose other experts than in the rollout for "
                f"{mismatches:.2%} of tokens and layers; training and rollout "
                "compute different numbers, and no log-probability of this run can be trusted"
            )


class PassRoutes:
    """The routes of one micro-batch; made before the forward pass, asked after it."""

    def __init__(
        self, routing: Routing, rows: TensorDict, inputs: ModelInputs, shard: SequenceShard | None
    ) -> None:
        """`inputs` are those of all tokens, before ranks split them."""
        self.routing, self.inputs, self.shard = routing, inputs, shard
        self.num_tokens = len(inputs.input_ids)
        replayed = None
        self.places: Tensor | None = None
        if ROUTED_EXPERTS in rows.keys():  # noqa: SIM118 (a TensorDict)
            self.places = token_places(rows, inputs)
            replayed = packed_routes(rows[ROUTED_EXPERTS], self.places, self.num_tokens)
            replayed = of_sparse_layers(replayed, routing)
            replayed = without_waiting(replayed, inputs.input_ids.device)
            replayed = replayed if shard is None else shard.select(replayed)
        self.rows = rows
        routing.begin(replayed)

    def selected(self) -> Tensor:
        """Routes of this rank's tokens, (n, layers, k)."""
        num_tokens = self.num_tokens if self.shard is None else self.shard.tokens_per_rank
        return self.routing.selected(num_tokens)

    def columns(self, options: RouteOptions, sources: Tensor) -> Columns:
        """What the pass adds to its columns; `sources` are this rank's tokens that predict."""
        columns: Columns = {}
        if torch.is_grad_enabled():
            options.load.add(self.selected()[sources], self.routing)
            if self.routing.aux_loss_coef:
                columns[AUX_LOSS] = self._aux_loss(sources)
        elif options.records:
            places = (
                self.places if self.places is not None else token_places(self.rows, self.inputs)
            )
            columns[ROUTED_EXPERTS] = routes_of_rows(self.selected(), places)
        wrong = [x.mismatches for x in self.routing.layers if x.mismatches is not None]
        if wrong:
            inputs = self.inputs if self.shard is None else self.inputs.shard(self.shard)
            per_token = inputs.unpack(torch.stack(wrong, 1)[sources].float().mean(1))  # (B, T)
            num_tokens = inputs.unpack(torch.ones_like(sources, dtype=torch.float32)).sum(1)
            columns[MISMATCHES] = per_token.sum(1) / num_tokens.clamp_min(1)
        self.routing.end()
        return columns

    def _aux_loss(self, sources: Tensor) -> Tensor:
        """(B,); 0 for a row without response tokens. Where ranks split the tokens, each has all."""
        num_rows, width = self.inputs.shape
        row_of_source = self.inputs.index // width  # (R,)
        counts = torch.bincount(row_of_source, minlength=num_rows).clamp_min(1).float()
        total = sources.new_zeros(num_rows, dtype=torch.float32)
        for layer, logits in zip(
            self.routing.layers, self.routing.logits(self.num_tokens), strict=True
        ):
            assert layer.selected is not None
            chosen = torch.zeros_like(logits, dtype=torch.float32).scatter_(
                1, layer.selected[: self.num_tokens].long(), 1.0
            )
            shares = probabilities(logits, has_sigmoid=layer.has_sigmoid)
            shape = (num_rows, layer.num_experts)
            means = [
                x.new_zeros(shape).index_add(0, row_of_source, self._of_all(x[sources]))
                / counts[:, None]
                for x in (chosen, shares)
            ]
            total = total + layer.num_experts * (means[0] * means[1]).sum(1)
        return total / len(self.routing.layers)

    def _of_all(self, values: Tensor) -> Tensor:
        return values if self.shard is None else self.shard.gather(values)


def probabilities(logits: Tensor, *, has_sigmoid: bool) -> Tensor:
    """Of each expert; routers with sigmoid scores are normalised to a sum of 1."""
    if not has_sigmoid:
        return logits.float().softmax(-1)
    scores = logits.float().sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def token_places(rows: TensorDict, inputs: ModelInputs) -> Tensor:
    """(B, L) the packed token that each entry of the rows is; -1 for padding."""
    real = rows["attention_mask"].bool().cpu()
    if not isinstance(inputs.parts, SharedPrompts):
        places = real.flatten().cumsum(0).view_as(real) - 1
        return torch.where(real, places, -1)
    num_prompt = real.shape[1] - inputs.shape[1]
    owners = torch.tensor(prompt_owners(rows, num_prompt))
    order = owners.argsort(stable=True)
    places = torch.full(real.shape, -1)
    starts = torch.tensor([0, *inputs.parts.prompts]).cumsum(0)
    inside = real[:, :num_prompt].cumsum(1) - 1
    prompt = starts[owners][:, None] + inside
    places[:, :num_prompt] = torch.where(real[:, :num_prompt], prompt, -1)
    is_response = real[order][:, num_prompt:]
    response = is_response.flatten().cumsum(0).view_as(is_response) - 1
    response = response + inputs.parts.num_prompt_tokens
    places[order, num_prompt:] = torch.where(is_response, response, -1)
    return places


def packed_routes(routes: Tensor, places: Tensor, num_tokens: int) -> Tensor:
    """(B, L, layers, k) to (N, layers, k)."""
    real = (places >= 0).to(routes.device)
    packed = routes.new_zeros(num_tokens, *routes.shape[2:])
    packed[places.to(routes.device)[real]] = routes[real]
    return packed


def routes_of_rows(selected: Tensor, places: Tensor) -> Tensor:
    """(N, layers, k) to (B, L, layers, k), 0 for padding, in as few bytes as there are experts."""
    places = places.to(selected.device)
    narrow = selected.to(torch.uint8 if selected.max() < 256 else torch.int16)
    return torch.where((places >= 0)[..., None, None], narrow[places.clamp_min(0)], 0)


def of_sparse_layers(routes: Tensor, routing: Routing) -> Tensor:
    """Of routes of all layers, those of layers with experts; wrong ones are refused."""
    sparse = [layer.layer for layer in routing.layers]
    if routes.shape[1] == len(sparse):
        sparse = list(range(len(sparse)))
    elif routes.shape[1] <= max(sparse):
        raise ValueError(
            f"{ROUTED_EXPERTS} has routes of {routes.shape[1]} layers, but the model has "
            f"{len(sparse)} layers with experts, up to layer {max(sparse)}; they are of another "
            "model: set actor.router_replay.mode=disabled"
        )
    routes = routes[:, sparse]
    if routes.numel() and routes.max() >= routing.num_experts:
        raise ValueError(
            f"{ROUTED_EXPERTS} names expert {routes.max()}, but the model has "
            f"{routing.num_experts}; they are of another model: set actor.router_replay.mode="
            "disabled"
        )
    # An engine whose kernels tell nothing leaves zeros.
    if routes.shape[-1] > 1 and (routes[..., 0] == routes[..., 1]).any():
        raise ValueError(
            f"{ROUTED_EXPERTS} sends a token to one expert twice, which no router does: the engine "
            "did not record the routes of all tokens; set actor.router_replay.mode=R2"
        )
    return routes


def load_metrics(load: ExpertLoad, group: Group = None) -> dict[str, float]:
    """How evenly experts were used since the last call, over all ranks of `group`.

    Of each layer the largest load over the mean; of all layers the worst, the mean, and the share
    of experts that no token went to.
    """
    if load.counts is None:
        return {}
    layers, counts = load.layers, all_reduce_(load.counts.double(), group=group)
    load.counts = None
    mean = counts.mean(1, keepdim=True).clamp_min(1e-12)
    largest = (counts / mean).amax(1).tolist()
    metrics = {f"actor/expert_load_max/layer_{n}": x for n, x in zip(layers, largest, strict=True)}
    metrics["actor/expert_load_max"] = max(largest)
    metrics["actor/expert_load_max_mean"] = sum(largest) / len(largest)
    metrics["actor/idle_experts"] = float((counts == 0).float().mean())
    return metrics


def prepare_replay(engine: BaseEngine, mode: str, *, is_exact: bool) -> None:
    """Tell the engine of a policy how its routes are replayed (`actor.router_replay.mode`)."""
    if mode != "disabled" and engine.routes is None:
        raise ValueError(
            f"actor.router_replay.mode is {mode}, but {type(engine.module).__name__} has no "
            "experts whose routes could be replayed: leave it out"
        )
    if mode != "disabled" and not engine.routes.can_replay:
        raise ValueError(
            f"actor.router_replay.mode is {mode}, but routers of {type(engine).__name__} choose by "
            "themselves: set it to disabled, or use strategy=fsdp"
        )
    if engine.routes is not None:
        engine.routes.must_agree = mode == "R3" and is_exact
