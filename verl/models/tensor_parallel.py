"""A model whose layers are divided among ranks by their features, to generate (arXiv:1909.08053).

    outputs divided   y_r = W_r x                   each rank its part         q, k, v, gate, up
    inputs divided    y = sum over r of W_r x_r     one all-reduce, all of y   o, down

Which layers are divided in which way is stated by the architecture's own plan, which transformers
ships with its config. Heads stay whole; key heads that ranks outnumber are held by several of them.
Where the outputs of a layer belong together (query, key and value in one layer, a norm over all
heads) they are gathered, and the layer behind takes its part of them: weights are divided then, but
attention is not. Embedding, norms, routers and output head are whole on every rank, so tied weights
stay tied and every rank has all logits. There is no backward pass: training divides otherwise.
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

OPTION = "rollout.tensor_model_parallel_size"
OUTPUTS, INPUTS = "colwise", "rowwise"
GATHERED_OUTPUTS, SPLIT_INPUTS = "colwise_gather_output", "rowwise_split_input"
PACKED_OUTPUTS, SUMMED = "packed_colwise", "moe_tp_experts"
DIVIDED = {OUTPUTS, INPUTS, GATHERED_OUTPUTS, SPLIT_INPUTS, PACKED_OUTPUTS, SUMMED}
WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise"}
"""Ways of transformers to divide what is small, or only its gradient; here it is left whole."""

QUERY, KEY_AND_VALUE = "q_proj", ("k_proj", "v_proj")

Cut = Callable[[Tensor], Tensor]
"""From a whole weight to this rank's part."""

_divided: "WeakKeyDictionary[nn.Module, dict[str, Cut]]" = WeakKeyDictionary()


def divide_model(model: PreTrainedModel, group: dist.ProcessGroup) -> PreTrainedModel:
    """Cut the layers of `model` down to this rank's part, in place. Once is enough.

    Every rank of the group calls it with the same whole model; its weights may be on the meta
    device, to be loaded in parts.
    """
    if model in _divided:
        return model
    if exact_capacity(model) is not None:
        raise ValueError(f"an exact model cannot be divided: set {OPTION}=1 or turn exact mode off")
    division = _Division(model, group)
    for name, style in division.styles(dict(model.named_modules())):
        division.divide_layer(name, style)
    for name, style in division.styles(dict(model.named_parameters())):
        division.divide_parameter(name, style)
    if not division.cuts:
        raise division.refusal(f"names layers that it does not have ({min(division.plan)})")
    _divided[model] = division.cuts
    return model


@torch.no_grad()
def load_weights(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write whole tensors, under their Hugging Face names, into the model's weights in place.

    Of a divided model this rank's part is written.
    """
    cuts = _divided.get(model, {})
    parameters = dict(model.named_parameters(remove_duplicate=False))  # tied ones by either name
    for name, whole in weights:
        if name not in parameters:
            raise ValueError(
                f"{type(model).__name__} has no weight {name!r}; they are named like "
                f"{next(iter(parameters))!r}: send those of the same architecture"
            )
        part = cuts[name](whole) if name in cuts else whole
        if part.shape != parameters[name].shape:
            raise ValueError(
                f"weight {name!r} has shape {tuple(whole.shape)}, this rank's part of it "
                f"{tuple(part.shape)}, but the model has {tuple(parameters[name].shape)}"
            )
        parameters[name].copy_(part)


class _Division:
    """Divides one model; `cuts` says afterwards which weights, and how."""

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup) -> None:
        self.model = model
        self.group = group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.cuts: dict[str, Cut] = {}
        self.config = model.config.get_text_config()
        self.plan: dict[str, str] = self.config.base_model_tp_plan or {}
        unknown = set(self.plan.values()) - DIVIDED - WHOLE
        if unknown or not self.plan:
            how = f"divides layers by {min(unknown)!r}" if unknown else "does not exist"
            raise self.refusal(how)

    def refusal(self, reason: str) -> ValueError:
        return ValueError(
            f"{type(self.model).__name__} cannot be divided among ranks: its plan in transformers "
            f"{reason}; set {OPTION}=1, or use rollout.name=vllm"
        )

    def styles(self, members: Iterable[str]) -> list[tuple[str, str]]:
        """The members, modules or parameters, that the plan divides, and how."""
        found = []
        for name in members:
            inside = name.removeprefix(f"{self.model.base_model_prefix}.")
            style = self.plan.get(re.sub(r"\.\d+\.", ".*.", inside), "")
            if style and style not in WHOLE:
                found.append((name, style))
        return found

    def divide_layer(self, name: str, style: str) -> None:
        layer = self.model.get_submodule(name)
        if style == SUMMED:
            layer.register_forward_hook(partial(_sum_over_ranks, self.group))
            return
        if not isinstance(layer, nn.Linear):
            raise ValueError(
                f"{name} is a {type(layer).__name__}; only linear layers can be divided among "
                f"ranks: merge adapters into the model first, or set {OPTION}=1"
            )
        if style == OUTPUTS:
            self._divide_outputs(name, layer, self._whole_heads(name, layer))
        elif style == GATHERED_OUTPUTS:
            self._divide_outputs(name, layer, self._even(name, layer.out_features))
            layer.register_forward_hook(partial(_gather_from_ranks, self.group))
        else:
            own = self._even(name, layer.in_features)
            self._divide_inputs(name, layer, own)
            if style == SPLIT_INPUTS:
                layer.register_forward_pre_hook(partial(_split_input, own))

    def divide_parameter(self, name: str, style: str) -> None:
        """Experts of one layer in one tensor: (experts, outputs, inputs)."""
        whole = self.model.get_parameter(name)
        if style == PACKED_OUTPUTS:  # gate and up, one after the other
            half = whole.shape[-2] // 2
            gate = self._even(name, half)
            cut = partial(_take, -2, torch.cat([gate, gate + half]))
        else:
            dim = -2 if style == OUTPUTS else -1
            cut = partial(_take, dim, self._even(name, whole.shape[dim]))
        self._cut(self.model.get_submodule(name.rpartition(".")[0]), name, cut)

    def _divide_outputs(self, name: str, layer: nn.Linear, own: Tensor) -> None:
        self._cut(layer, f"{name}.weight", partial(_take, 0, own))
        if layer.bias is not None:
            self._cut(layer, f"{name}.bias", partial(_take, 0, own))
        layer.out_features = len(own)

    def _divide_inputs(self, name: str, layer: nn.Linear, own: Tensor) -> None:
        self._cut(layer, f"{name}.weight", partial(_take, 1, own))
        if layer.bias is not None:
            self._cut(layer, f"{name}.bias", partial(_once, self.rank))
        layer.in_features = len(own)
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

    def _cut(self, layer: nn.Module, name: str, cut: Cut) -> None:
        leaf = name.rpartition(".")[2]
        part = cut(layer.get_parameter(leaf).detach())
        setattr(layer, leaf, nn.Parameter(part, requires_grad=False))
        self.cuts[name] = cut


def _take(dim: int, indices: Tensor, whole: Tensor) -> Tensor:
    return whole.index_select(dim, indices.to(whole.device))


def _once(rank: int, whole: Tensor) -> Tensor:
    """What is added before ranks are summed must be there once."""
    return whole.clone() if rank == 0 else torch.zeros_like(whole)


def _gather_from_ranks(
    group: dist.ProcessGroup, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    """A forward hook."""
    del layer, inputs
    parts = [torch.empty_like(output) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, output, group=group)
    return torch.cat(parts, dim=-1)


def _split_input(own: Tensor, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A hook before the forward pass; the features of a rank are consecutive."""
    del layer
    first, last = int(own[0]), int(own[-1])
    return inputs[0][..., first : last + 1], *inputs[1:]


def _sum_over_ranks(
    group: dist.ProcessGroup, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    """A forward hook."""
    del layer, inputs
    dist.all_reduce(output, group=group)
    return output
