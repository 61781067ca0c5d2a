"""Masters and moments under Hugging Face names, so that a checkpoint fits every layout and engine.

    this rank's slices -> its part of each parameter -> whole tensors, one at a time -> a share

Every rank keeps an equal stretch of every whole tensor (`FlatSlice`), whatever it trains. Loading
goes the same way back. Moments are numbered as torch numbers them for the Hugging Face model.

Weights from a distributed checkpoint of Megatron's own, into whatever layout this is.

megatron-core says of every local weight which box of which stored tensor it is; the boxes are read
by `verl.utils.checkpoint.dist_checkpoint`, which unpickles nothing. Rows that fill the vocabulary
up differ between layouts: those past the vocabulary are zero here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

from verl.utils.checkpoint.dist_checkpoint import DistTensor, read_index
from verl.utils.checkpoint.pieces import FlatSlice, Part, divide
from verl.utils.distributed import all_reduce_
from verl.workers.engine.megatron.model import ModelChunk
from verl.workers.engine.megatron.optimizer import ParallelOptimizer
from verl.workers.engine.megatron.weights import (
    LocalWeight,
    by_name,
    gather,
    load_weights,
    local_weights,
)
from verl.workers.engine.optimizer import is_moment

NamedTensors = Iterable[tuple[str, Tensor]]
MASTERS = "masters"


class StateOfLayout:
    """The state of an optimizer whose parameters are divided among the ranks of a layout."""

    def __init__(
        self,
        chunks: list[ModelChunk],
        hf_config: Any,
        optimizer: ParallelOptimizer,
        names: Sequence[str],
    ) -> None:
        """`names` are the trained parameters of the Hugging Face model, in its order."""
        self._chunks, self._config, self._optimizer = chunks, hf_config, optimizer
        self._names = names

    def save(self) -> dict[str, Any]:
        """The state of a `MasterOptimizer` on the Hugging Face model; every rank must ask."""
        optimizer = self._optimizer.optimizer
        local: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
        counters = {key: v for key, v in local.get(0, {}).items() if not is_moment(v)}
        moments = [key for key, value in local.get(0, {}).items() if is_moment(value)]
        state: dict[int, dict[str, Any]] = {}
        if local:
            state = {number: deepcopy(counters) for number in range(len(self._names))}
        for key in moments:
            for number, (_, share) in enumerate(self._shares(key)):
                state[number][key] = share
        group = {**optimizer.state_dict()["param_groups"][0], "params": [*range(len(self._names))]}
        return {
            MASTERS: dict(self._shares(MASTERS)),
            "optimizer": {"state": state, "param_groups": [group]},
            "schedule": self._optimizer.schedule.state_dict(),
            "num_skipped_steps": self._optimizer.num_skipped_steps,
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `save` gave on any layout, or another engine."""
        if state[MASTERS].keys() != set(self._names):
            differing = sorted(state[MASTERS].keys() ^ set(self._names))
            raise ValueError(
                f"the checkpoint has optimizer state of {len(state[MASTERS])} weights and "
                f"{len(self._names)} are trained; they differ in {', '.join(differing[:3])}: "
                "train the same (model.override_config.moe_config.freeze_moe_router)"
            )
        own, names = self._optimizer, list(self._optimizer.masters)
        self._fill(state[MASTERS].items(), own.masters)
        own._write_back()
        saved = state["optimizer"]["state"]
        first = next(iter(saved.values()), {})
        moments: dict[str, dict[str, Any]] = {name: {} for name in names} if saved else {}
        for key, value in first.items():
            if isinstance(value, (Tensor, FlatSlice)) and is_moment(local_of(value)):
                values = {name: torch.empty_like(master) for name, master in own.masters.items()}
                self._fill(
                    ((name, saved[number][key]) for number, name in enumerate(self._names)), values
                )
            else:
                values = {name: deepcopy(value) for name in names}  # a count of its own for each
            for name in names:
                moments[name][key] = values[name]
        (group,) = own.optimizer.state_dict()["param_groups"]
        (stored,) = state["optimizer"]["param_groups"]
        own.optimizer.load_state_dict(
            {
                "state": {number: moments[name] for number, name in enumerate(names) if moments},
                "param_groups": [{**stored, "params": group["params"]}],
            }
        )
        own.schedule.load_state_dict(state["schedule"])
        own.num_skipped_steps = int(state["num_skipped_steps"])

    def _shares(self, key: str) -> Iterator[tuple[str, FlatSlice]]:
        """This rank's stretch of the master or moment of every parameter."""
        values = self._whole_parameters(key)

        def value_of(weight: LocalWeight) -> Tensor:
            return values[f"{weight.chunk}.{weight.name}"]

        trained = set(self._names)
        found = gather(self._chunks, self._config, value_of, dtype=torch.float32, names=trained)
        yield from shares(found)

    def _whole_parameters(self, key: str) -> dict[str, Tensor]:
        """Masters or moments in the shape of this rank's parameters."""
        own = self._optimizer
        slices = {
            name: master.detach() if key == MASTERS else own.optimizer.state[master][key]
            for name, master in own.masters.items()
        }
        values = {
            name: torch.empty_like(parameter, dtype=torch.float32)
            for name, parameter in own.parameters.items()
        }
        own.join(slices, values)
        return values

    def _fill(self, parts: Iterable[tuple[str, Part]], targets: Mapping[str, Tensor]) -> None:
        """Write whole tensors, one at a time, into this rank's masters or moments."""
        own = self._optimizer
        values = {
            name: torch.zeros_like(p, dtype=torch.float32) for name, p in own.parameters.items()
        }
        pieces = by_name(local_weights(self._chunks, self._config))
        for name, part in parts:
            whole = whole_of(part, next(iter(values.values())).device)
            for weight, piece in pieces[name]:
                values[f"{weight.chunk}.{weight.name}"][piece.inside].copy_(whole[piece.outside])
        for name, target in targets.items():
            target.copy_(own.own_part(name, values[name]))


def shares(tensors: NamedTensors) -> Iterator[tuple[str, FlatSlice]]:
    """This rank's equal stretch of whole tensors."""
    for name, whole in tensors:
        piece = divide(whole.shape, dist.get_rank(), dist.get_world_size())
        stretch = whole.reshape(-1)[piece.start[0] :][: piece.num_elements].clone()
        yield name, FlatSlice(tensor=stretch, shape=tuple(whole.shape), start=piece.start[0])


def whole_of(part: Part, device: torch.device) -> Tensor:
    """A tensor of which every rank has a stretch, or all; every rank must ask."""
    if not isinstance(part, FlatSlice):
        return part.to(device)
    whole = torch.zeros(part.shape, dtype=part.tensor.dtype, device=device)
    whole.view(-1)[part.start :][: part.tensor.numel()] = part.tensor.to(device)
    return all_reduce_(whole)


def local_of(part: Part) -> Tensor:
    return part.tensor if isinstance(part, FlatSlice) else part


def load_shares(
    chunks: list[ModelChunk], hf_config: Any, parts: Mapping[str, Part], device: torch.device
) -> None:
    """Load weights of which every rank has a stretch."""
    whole = ((name, whole_of(part, device)) for name, part in parts.items())
    load_weights(chunks, hf_config, whole)


OF_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@torch.no_grad()
def load_dist_checkpoint(
    chunks: list[ModelChunk], folder: Path, *, prefix: str, vocabulary: int, is_fresh_critic: bool
) -> None:
    """Fill every weight of this rank. A critic that is made of a language model starts with a head
    of zeros."""
    stored = read_index(folder)
    for chunk in chunks:
        for part in chunk_parts(chunk, prefix, stored):
            name = part.key.removeprefix(prefix)
            found = stored.get(part.key)
            assert part.data is not None
            part.data.zero_()
            if name.startswith("output_layer.") and is_fresh_critic:
                if found is not None and found.shape == tuple(part.global_shape):
                    copy(part, found, None)
            elif found is None:
                raise ValueError(
                    f"{folder} has no {part.key}; it has {', '.join(list(stored)[:3])}, ... "
                    "(megatron.dist_checkpointing_prefix comes before each name)"
                )
            else:
                copy(part, found, vocabulary if name in OF_VOCABULARY else None)


def copy(part: ShardedTensor, found: DistTensor, num_rows: int | None) -> None:
    """Of a tensor with rows for a vocabulary, those of real tokens."""
    shape, start = tuple(part.global_shape), tuple(part.global_offset)
    added = part.prepend_axis_num
    size = (1,) * added + tuple(part.local_shape)
    target = part.data
    assert target is not None
    if num_rows is not None:
        num_real = max(0, min(size[0], min(num_rows, found.shape[0]) - start[0]))
        if found.shape[0] < num_rows or found.shape[1:] != shape[1:]:
            raise ValueError(
                f"{found.name} has the shape {list(found.shape)} for {num_rows} tokens of "
                f"{shape[1]} numbers: the checkpoint is of another model"
            )
        size, target = (num_real, *size[1:]), target[:num_real]
        if not num_real:
            return
    elif found.shape != shape:
        raise ValueError(
            f"{found.name} has the shape {list(found.shape)}, and the model {list(shape)}: the "
            "checkpoint is of another model"
        )
    target.copy_(found.read(start, size).view(target.shape))


def chunk_parts(
    chunk: ModelChunk, prefix: str, stored: Mapping[str, DistTensor]
) -> Iterator[ShardedTensor]:
    """Local weights, or views of them, with their places in stored tensors.

    Layers are stored as one tensor for all, or each by itself, as their writer chose.
    """
    ways = [list(parts(chunk, prefix, apart)) for apart in (False, True)]
    in_file = [[part.key in stored for part in way] for way in ways]
    yield from max(zip(in_file, ways, strict=True), key=lambda pair: sum(pair[0]))[1]


def parts(chunk: ModelChunk, prefix: str, layers_apart: bool) -> Iterator[ShardedTensor]:
    described: Any = chunk.sharded_state_dict(
        prefix=prefix, metadata={"non_homogeneous_layers": layers_apart}
    )
    for value in nested_values(described):
        made = value.build() if isinstance(value, ShardedTensorFactory) else value
        for one in nested_values(made) if isinstance(made, (dict, list)) else [made]:
            if isinstance(one, ShardedTensor):
                yield one
