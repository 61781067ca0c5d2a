"""Tensor parallelism for generation: layers sharded across ranks by features (arXiv:1909.08053).

    column-wise   y_r = W_r x                   each rank has its shard of y   q, k, v, gate, up
    row-wise      y = sum over r of W_r x_r     one all-reduce, all of y       o, down

The tensor-parallel plan of the architecture, which transformers ships with its config, states how
each layer is sharded. Heads stay whole; with fewer key heads than ranks, key heads are replicated.
Where the outputs of a layer belong together (query, key and value in one layer, a norm over all
heads) they are gathered, and the next layer takes its shard of them: weights are sharded then, but
attention is not. Embedding, norms, routers and output head are replicated, so tied weights stay
tied and every rank has all logits. There is no backward pass: training shards otherwise.

Experts are sharded by features like other layers, or, with `spreads_experts`, each rank has an
equal share of every layer's experts whole (expert parallelism) and the sum over ranks is that over
a token's experts. A model whose plan does not exist can still have its experts spread.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.models.attention import heads_per_rank, key_heads_of_rank
from verl.models.exact import exact_capacity
from verl.models.experts import expert_modules
from verl.models.vision import family_of, has_vision

OPTION = "rollout.tensor_model_parallel_size"
EXPERTS_OPTION = "rollout.expert_parallel_size"
OUTPUTS, INPUTS = "colwise", "rowwise"
GATHERED_OUTPUTS, SPLIT_INPUTS = "colwise_gather_output", "rowwise_split_input"
PACKED_OUTPUTS, SUMMED = "packed_colwise", "moe_tp_experts"
SHARDED = {OUTPUTS, INPUTS, GATHERED_OUTPUTS, SPLIT_INPUTS, PACKED_OUTPUTS, SUMMED}
WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise"}
"""Styles of transformers for small layers, or for gradients only; here they are replicated."""

QUERY, KEY_AND_VALUE = "q_proj", ("k_proj", "v_proj")

ShardFn = Callable[[Tensor], Tensor]
"""Function from a whole weight to this rank's shard."""

_sharded: "WeakKeyDictionary[nn.Module, dict[str, ShardFn]]" = WeakKeyDictionary()


def shard_model(
    model: PreTrainedModel, group: dist.ProcessGroup, *, spreads_experts: bool = False
) -> PreTrainedModel:
    """Shard the layers of `model` in place; a second call changes nothing.

    Every rank of the group calls it with the same whole model; its weights may be on the meta
    device, to be loaded shard by shard.
    """
    if model in _sharded:
        return model
    if exact_capacity(model) is not None:
        raise ValueError(f"an exact model cannot be sharded: set {OPTION}=1 or turn exact mode off")
    sharding = _Sharding(model, group, spreads_experts=spreads_experts)
    for name, style in sharding.styles(dict(model.named_modules())):
        sharding.shard_layer(name, style)
    for name, style in sharding.styles(dict(model.named_parameters())):
        sharding.shard_parameter(name, style)
    for name in sharding.experts:
        sharding.spread_experts(name)
    if not sharding.shard_fns:
        raise sharding.refusal(f"names layers that it does not have ({min(sharding.plan)})")
    _sharded[model] = sharding.shard_fns
    return model


@torch.no_grad()
def load_weights(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write whole tensors, under their Hugging Face names, into the model's weights in place.

    Of a sharded model this rank's shard is written.
    """
    shard_fns = _sharded.get(model, {})
    parameters = dict(model.named_parameters(remove_duplicate=False))  # tied ones by either name
    for name, whole in weights:
        if name not in parameters:
            raise ValueError(
                f"{type(model).__name__} has no weight {name!r}; they are named like "
                f"{next(iter(parameters))!r}: send those of the same architecture"
            )
        shard = shard_fns[name](whole) if name in shard_fns else whole
        if shard.shape != parameters[name].shape:
            raise ValueError(
                f"weight {name!r} has shape {tuple(whole.shape)}, this rank's shard of it "
                f"{tuple(shard.shape)}, but the model has {tuple(parameters[name].shape)}"
            )
        parameters[name].copy_(shard)


class _Sharding:
    """Shards one model; `shard_fns` maps each sharded weight to its function."""

    def __init__(
        self, model: PreTrainedModel, group: dist.ProcessGroup, *, spreads_experts: bool
    ) -> None:
        self.model = model
        self.group = group
        self.experts = expert_modules(model) if spreads_experts else {}
        """Those that each rank has a share of whole."""

        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.shard_fns: dict[str, ShardFn] = {}
        self.config = model.config.get_text_config()
        self.plan: dict[str, str] = self.config.base_model_tp_plan or {}
        if spreads_experts and not self.experts:
            raise ValueError(
                f"{EXPERTS_OPTION} is {self.num_ranks}, but {type(model).__name__} has no experts: "
                "set it to 1"
            )
        unknown = set(self.plan.values()) - SHARDED - WHOLE
        if unknown or not (self.plan or self.experts):
            how = f"shards layers by {min(unknown)!r}" if unknown else "does not exist"
            raise self.refusal(how)

    def refusal(self, reason: str) -> ValueError:
        return ValueError(
            f"{type(self.model).__name__} cannot be sharded across ranks: its plan in transformers "
            f"{reason}; set {OPTION}=1, or use rollout.name=vllm"
        )

    def styles(self, members: Iterable[str]) -> list[tuple[str, str]]:
        """The members, modules or parameters, that the plan shards, with their styles."""
        styles = []
        for name in members:
            inside = name.removeprefix(f"{self.model.base_model_prefix}.")
            if has_vision(self.model.config):  # the tower is replicated
                inside = inside.removeprefix(f"{family_of(self.model.config).language}.")
            style = self.plan.get(re.sub(r"\.\d+\.", ".*.", inside), "")
            is_spread = name in self.experts or name.rpartition(".")[0] in self.experts
            if style and style not in WHOLE and not is_spread:
                styles.append((name, style))
        return styles

    def shard_layer(self, name: str, style: str) -> None:
        layer = self.model.get_submodule(name)
        if style == SUMMED:
            layer.register_forward_hook(partial(_sum_over_ranks, self.group))
            return
        if not isinstance(layer, nn.Linear):
            raise ValueError(
                f"{name} is a {type(layer).__name__}; only linear layers can be sharded across "
                f"ranks: merge adapters into the model first, or set {OPTION}=1"
            )
        if style == OUTPUTS:
            self._shard_outputs(name, layer, self._whole_heads(name, layer))
        elif style == GATHERED_OUTPUTS:
            self._shard_outputs(name, layer, self._even(name, layer.out_features))
            layer.register_forward_hook(partial(_gather_from_ranks, self.group))
        else:
            indices = self._even(name, layer.in_features)
            self._shard_inputs(name, layer, indices)
            if style == SPLIT_INPUTS:
                layer.register_forward_pre_hook(partial(_split_input, indices))

    def shard_parameter(self, name: str, style: str) -> None:
        """Experts of one layer in one tensor: (experts, outputs, inputs)."""
        whole = self.model.get_parameter(name)
        if style == PACKED_OUTPUTS:  # gate and up, one after the other
            half = whole.shape[-2] // 2
            gate = self._even(name, half)
            shard_fn = partial(_take, -2, torch.cat([gate, gate + half]))
        else:
            dim = -2 if style == OUTPUTS else -1
            shard_fn = partial(_take, dim, self._even(name, whole.shape[dim]))
        self._shard(self.model.get_submodule(name.rpartition(".")[0]), name, shard_fn)

    def spread_experts(self, name: str) -> None:
        """Give this rank its share of the experts of a layer."""
        layer = self.model.get_submodule(name)
        routing = vars(layer)["routing"]
        if routing.num_experts % self.num_ranks:
            raise ValueError(
                f"{EXPERTS_OPTION} ({self.num_ranks}) must divide the {routing.num_experts} "
                f"experts of {name}"
            )
        indices = torch.arange(routing.num_experts).chunk(self.num_ranks)[self.rank]
        routing.own_experts = range(int(indices[0]), int(indices[-1]) + 1)
        for leaf, _ in list(layer.named_parameters(recurse=False)):
            self._shard(layer, f"{name}.{leaf}", partial(_take, 0, indices))
        layer.register_forward_hook(partial(_sum_over_ranks, self.group))

    def _shard_outputs(self, name: str, layer: nn.Linear, indices: Tensor) -> None:
        self._shard(layer, f"{name}.weight", partial(_take, 0, indices))
        if layer.bias is not None:
            self._shard(layer, f"{name}.bias", partial(_take, 0, indices))
        layer.out_features = len(indices)

    def _shard_inputs(self, name: str, layer: nn.Linear, indices: Tensor) -> None:
        self._shard(layer, f"{name}.weight", partial(_take, 1, indices))
        if layer.bias is not None:
            self._shard(layer, f"{name}.bias", partial(_once, self.rank))
        layer.in_features = len(indices)
        layer.register_forward_hook(partial(_sum_over_ranks, self.group))

    def _whole_heads(self, name: str, layer: nn.Linear) -> Tensor:
        """This rank's outputs of a layer; those of attention are heads."""
        parent, _, leaf = name.rpartition(".")
        if not type(self.model.get_submodule(parent)).__name__.endswith("Attention"):
            return self._even(name, layer.out_features)
        if leaf == QUERY:
            heads_per_rank(self.config.num_attention_heads, self.num_ranks, OPTION)
            return self._even(name, layer.out_features)
        if leaf not in KEY_AND_VALUE:
            raise ValueError(
                f"{name} computes more than one of query, key and value, and its outputs cannot "
                f"be told apart: set {OPTION}=1, or use rollout.name=vllm"
            )
        num_heads = self.config.num_key_value_heads
        heads = key_heads_of_rank(num_heads, self.num_ranks, self.rank)
        by_head = torch.arange(layer.out_features).view(num_heads, -1)
        return by_head[heads].flatten()

    def _even(self, name: str, num_features: int) -> Tensor:
        if num_features % self.num_ranks:
            raise ValueError(
                f"{OPTION} ({self.num_ranks}) must divide the {num_features} features of {name}"
            )
        return torch.arange(num_features).chunk(self.num_ranks)[self.rank]

    def _shard(self, layer: nn.Module, name: str, shard_fn: ShardFn) -> None:
        leaf = name.rpartition(".")[2]
        shard = shard_fn(layer.get_parameter(leaf).detach())
        setattr(layer, leaf, nn.Parameter(shard, requires_grad=False))
        self.shard_fns[name] = shard_fn


def _take(dim: int, indices: Tensor, whole: Tensor) -> Tensor:
    return whole.index_select(dim, indices.to(whole.device))


def _once(rank: int, whole: Tensor) -> Tensor:
    """A bias that is added before the all-reduce is kept on rank 0 only."""
    return whole.clone() if rank == 0 else torch.zeros_like(whole)


def _gather_from_ranks(
    group: dist.ProcessGroup, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    """Forward hook: all-gather the outputs of all ranks."""
    del layer, inputs
    parts = [torch.empty_like(output) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, output, group=group)
    return torch.cat(parts, dim=-1)


def _split_input(
    indices: Tensor, layer: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Forward pre-hook: select this rank's features, which are consecutive."""
    del layer
    first, last = int(indices[0]), int(indices[-1])
    return inputs[0][..., first : last + 1], *inputs[1:]


def _sum_over_ranks(
    group: dist.ProcessGroup, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    """Forward hook: all-reduce the partial sums of all ranks."""
    del layer, inputs
    dist.all_reduce(output, group=group)
    return output
