"""Weights between Hugging Face names and this rank's shards in megatron-core.

A local parameter is a list of pieces: a box of it equals a box of a Hugging Face tensor. Loading
copies boxes in; exporting copies them out and adds up what the ranks have; optimizer state, which
has the shape of its parameter, moves between layouts by the same boxes.

    linear_qkv   rows by KV group: its query heads, then its key, then its value
    linear_fc1   rows by tensor rank: its columns of the gate, then those of the up projection
    experts      `gate_up_proj[e]` and `down_proj[e]` of one Hugging Face tensor per layer
    embedding    rows of the vocabulary, then zeros up to a multiple of the tensor size

Names are those of the Hugging Face module; `read_tensors` gives the ones that files have, where
each expert is a tensor of its own, and `load_weights` takes both.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from torch import Tensor

from verl.workers.engine.megatron.layout import expert_width, num_experts
from verl.workers.engine.megatron.model import ModelChunk, is_tied

Box = tuple[slice | int, ...]
"""Where a piece is in a tensor; an index drops its dimension."""

EXPERT_IN_FILE = re.compile(
    r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
LAYER = re.compile(r"model\.layers\.(\d+)\.")
EXPERT_BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class Piece:
    """`local[inside] == whole[outside]` for a local weight and the Hugging Face tensor `name`."""

    name: str
    outside: Box
    inside: Box
    is_owner: bool
    """Whether this rank contributes it to the whole tensor; of replicas, one does."""


@dataclass(frozen=True)
class LocalWeight:
    """A weight of this rank: parameter or persistent buffer `name` of chunk number `chunk`."""

    chunk: int
    name: str
    tensor: Tensor
    pieces: list[Piece]


@dataclass(frozen=True)
class Rows:
    """`count` rows of a Hugging Face tensor, or of its expert number `expert`."""

    name: str
    start: int
    count: int
    expert: int | None = None


def local_weights(chunks: list[ModelChunk], hf_config: Any) -> Iterator[LocalWeight]:
    """Every weight of this rank with its pieces."""
    text = hf_config.get_text_config()
    for number, chunk in enumerate(chunks):
        tensors = {**dict(chunk.named_parameters()), **dict(chunk.named_buffers())}
        for name in chunk.state_dict(keep_vars=True):
            if name not in tensors:
                continue  # extra state of a module, not a tensor
            kind, _, rest = name.removeprefix("decoder.").partition(".")
            if kind == "layers":
                index, _, rest = rest.partition(".")
                part: Any = chunk.decoder.layers[int(index)]
                layer = part.layer_number - 1
                pieces = layer_pieces(f"model.layers.{layer}.", rest, text, tensors[name])
            else:
                pieces = outer_pieces(chunk, kind, rest, hf_config, tensors[name])
            yield LocalWeight(number, name, tensors[name].detach(), pieces)


def outer_pieces(
    chunk: ModelChunk, kind: str, leaf: str, hf_config: Any, local: Tensor
) -> list[Piece]:
    """Of what is outside of layers."""
    is_value_model = "score.weight" in chunk.whole_shapes
    vocabulary = hf_config.get_text_config().vocab_size
    if kind == "embedding":
        return columns([Rows("model.embed_tokens.weight", 0, vocabulary)], local)
    if kind == "final_layernorm":
        return replicated("model.norm.weight", local)
    assert kind == "output_layer", f"megatron-core has an unknown weight {kind}.{leaf}"
    if is_value_model:
        return replicated(f"score.{leaf}", local)
    if is_tied(hf_config):  # the last stage's copy of the first stage's embedding
        return columns([Rows("model.embed_tokens.weight", 0, vocabulary)], local, is_owner=False)
    return columns([Rows("lm_head.weight", 0, vocabulary)], local)


def layer_pieces(prefix: str, name: str, text: Any, local: Tensor) -> list[Piece]:
    """Of a weight of the layer whose Hugging Face names begin with `prefix`."""
    if name in REPLICATED:
        return replicated(prefix + replicated_name(name, text), local)
    if name in COLUMNS:
        whole = prefix + COLUMNS[name]
        size = parallel_state.get_tensor_model_parallel_world_size()
        return columns([Rows(whole, 0, local.shape[0] * size)], local)
    if name == "self_attention.linear_proj.weight":
        return row_parallel(f"{prefix}self_attn.o_proj.weight", local)
    if name.startswith("self_attention.linear_qkv."):
        return columns(attention_rows(prefix, name.rpartition(".")[2], text), local)
    if name.startswith("mlp.experts."):
        return expert_pieces(f"{prefix}mlp.experts.", name, text, local)
    where = "mlp.shared_experts." if name.startswith("mlp.shared_experts.") else "mlp."
    if name == f"{where}linear_fc2.weight":
        return row_parallel(f"{prefix}{where}down_proj.weight", local)
    assert name == f"{where}linear_fc1.weight", f"megatron-core has an unknown weight {name}"
    gate, up = f"{prefix}{where}gate_proj.weight", f"{prefix}{where}up_proj.weight"
    return columns(halves(Rows(gate, 0, 0), Rows(up, 0, 0), local.shape[0] // 2), local)


REPLICATED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": f"mlp.gate.{EXPERT_BIAS}",
}
COLUMNS = {
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}


def replicated_name(name: str, text: Any) -> str:
    if name == "self_attention.q_layernorm.weight" and text.model_type == "deepseek_v3":
        return "self_attn.q_a_layernorm.weight"
    return REPLICATED[name]


def attention_rows(prefix: str, leaf: str, text: Any) -> list[Rows]:
    """Query heads, key and value of each KV group; `leaf` is weight or bias."""
    head = text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads
    queries = head * text.num_attention_heads // text.num_key_value_heads
    return [
        Rows(f"{prefix}self_attn.{name}_proj.{leaf}", group * count, count)
        for group in range(text.num_key_value_heads)
        for name, count in (("q", queries), ("k", head), ("v", head))
    ]


def expert_pieces(prefix: str, name: str, text: Any, local: Tensor) -> list[Piece]:
    """Of `local_experts.<number>.linear_fc1` or `linear_fc2`."""
    number, leaf, _ = name.removeprefix("mlp.experts.local_experts.").split(".")
    experts = num_experts(text)
    assert experts is not None, "a weight of an expert belongs to a model with experts"
    ranks: Any = parallel_state.get_expert_model_parallel_world_size()
    own: Any = parallel_state.get_expert_model_parallel_rank()
    rank: Any = parallel_state.get_expert_tensor_parallel_rank()
    expert = int(number) + own * experts // ranks
    if leaf == "linear_fc2":
        part = slice(rank * local.shape[1], (rank + 1) * local.shape[1])
        outside = (expert, slice(0, local.shape[0]), part)
        return [Piece(f"{prefix}down_proj", outside, (slice(None), slice(None)), True)]
    gate = Rows(f"{prefix}gate_up_proj", 0, 0, expert)
    up = Rows(gate.name, expert_width(text), 0, expert)
    size = parallel_state.get_expert_tensor_parallel_world_size()
    return cut(halves(gate, up, local.shape[0] // 2, size), local, rank)


def halves(gate: Rows, up: Rows, part: int, size: int | None = None) -> list[Rows]:
    """`part` rows of each for every tensor rank in turn."""
    size = size or parallel_state.get_tensor_model_parallel_world_size()
    return [
        Rows(half.name, half.start + rank * part, part, half.expert)
        for rank in range(size)
        for half in (gate, up)
    ]


def columns(rows: list[Rows], local: Tensor, *, is_owner: bool = True) -> list[Piece]:
    """Of a weight whose outputs are split over the tensor group."""
    return cut(rows, local, parallel_state.get_tensor_model_parallel_rank(), is_owner=is_owner)


def cut(rows: list[Rows], local: Tensor, rank: int, *, is_owner: bool = True) -> list[Piece]:
    """The part of the concatenated `rows` that rank number `rank` has, each with local's length."""
    pieces, position = [], -rank * local.shape[0]
    for part in rows:
        start, end = max(position, 0), min(position + part.count, local.shape[0])
        if start < end:
            first = part.start + start - position
            outside: Box = (slice(first, first + end - start),)
            if part.expert is not None:
                outside = (part.expert, *outside)
            pieces.append(Piece(part.name, outside, (slice(start, end),), is_owner))
        position += part.count
    return pieces


def row_parallel(name: str, local: Tensor) -> list[Piece]:
    """Of a weight whose inputs are split over the tensor group."""
    start = parallel_state.get_tensor_model_parallel_rank() * local.shape[1]
    outside = (slice(None), slice(start, start + local.shape[1]))
    return [Piece(name, outside, (slice(None), slice(None)), True)]


def replicated(name: str, local: Tensor) -> list[Piece]:
    is_owner = parallel_state.get_tensor_model_parallel_rank() == 0
    box = (slice(None),) * local.dim()
    return [Piece(name, box, box, is_owner)]


def by_name(weights: Iterable[LocalWeight]) -> dict[str, list[tuple[LocalWeight, Piece]]]:
    found = defaultdict(list)
    for weight in weights:
        for piece in weight.pieces:
            found[piece.name].append((weight, piece))
    return found


@torch.no_grad()
def load_weights(
    chunks: list[ModelChunk], hf_config: Any, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Copy this rank's shards out of whole tensors; a missing or unknown name is refused.

    A value model without a head gets one of zeros, as `verl.models.loading` gives it.
    """
    shapes, weights = chunks[0].whole_shapes, list(local_weights(chunks, hf_config))
    for weight in weights:
        weight.tensor.zero_()  # padding of the vocabulary, and the head of a fresh value model
    pieces, loaded = by_name(weights), dict.fromkeys(shapes, 0)
    for file_name, tensor in tensors:
        if is_left_out(file_name, hf_config, shapes):
            continue
        name, expert, offset = module_name(file_name, hf_config)
        if name not in shapes:
            raise ValueError(f"{file_name} is not a weight of {hf_config.model_type}")
        for weight, piece in pieces[name]:
            box = within(piece.outside, tensor, expert, offset)
            if box is not None:
                weight.tensor[piece.inside].copy_(tensor[box])
        loaded[name] += tensor.numel()
    missing = [
        name
        for name, shape in shapes.items()
        if loaded[name] != shape.numel() and not name.startswith("score.")
    ]
    if missing:
        raise ValueError(
            f"{len(missing)} weights of {hf_config.model_type} are missing or incomplete, "
            f"among them {', '.join(missing[:5])}"
        )


def is_left_out(name: str, hf_config: Any, shapes: Mapping[str, torch.Size]) -> bool:
    """Whether a model has a tensor that is not trained here: a tied head, the head of a language
    model in a value model, frequencies, layers that predict further tokens."""
    layer = LAYER.match(name)
    if layer and int(layer[1]) >= hf_config.get_text_config().num_hidden_layers:
        return True
    return name.endswith("rotary_emb.inv_freq") or (
        name == "lm_head.weight" and "lm_head.weight" not in shapes
    )


def module_name(name: str, hf_config: Any) -> tuple[str, int | None, int]:
    """A file's name as the module has it, the expert if it is one expert's, and its first row."""
    match = EXPERT_IN_FILE.fullmatch(name)
    if match is None:
        name = name.replace(".block_sparse_moe.", ".mlp.")
        return name.replace("v_head.summary.", "score."), None, 0
    layer, expert, leaf = match.groups()
    if leaf in ("down_proj", "w2"):
        return f"{layer}.mlp.experts.down_proj", int(expert), 0
    offset = expert_width(hf_config.get_text_config()) if leaf in ("up_proj", "w3") else 0
    return f"{layer}.mlp.experts.gate_up_proj", int(expert), offset


def within(outside: Box, tensor: Tensor, expert: int | None, offset: int) -> Box | None:
    """`outside` in a tensor that has one expert's rows from `offset` on; None: not in it."""
    if expert is None:
        return outside
    rows = outside[1]
    assert isinstance(rows, slice), "a piece of an expert has rows"
    if outside[0] != expert or not offset <= rows.start < offset + tensor.shape[0]:
        return None
    return (slice(rows.start - offset, rows.stop - offset), *outside[2:])


def read_tensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a Hugging Face checkpoint, one at a time."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no *.safetensors; save the model in that format")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def export_weights(
    chunks: list[ModelChunk], hf_config: Any, names: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors under Hugging Face names, all or those in `names`, one at a time; every rank
    must take part."""
    return gather(chunks, hf_config, lambda weight: weight.tensor, names=names)


def trained_names(names: Iterable[str], *, with_routers: bool = True) -> list[str]:
    """Of parameters, without buffers and, if they are frozen, without routers."""
    left_out = (EXPERT_BIAS,) if with_routers else (EXPERT_BIAS, ".mlp.gate.weight")
    return [name for name in names if not name.endswith(left_out)]


@torch.no_grad()
def gather(
    chunks: list[ModelChunk],
    hf_config: Any,
    value_of: Callable[[LocalWeight], Tensor],
    *,
    dtype: torch.dtype | None = None,
    names: Container[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of what `value_of` gives for each local weight, in its shape; of those in
    `names`, and in `dtype`, or of all in their own.

    Each box is written by one rank of the model-parallel group and zero elsewhere, so the sum of
    the bytes is the tensor, to the bit.
    """
    pieces = by_name(local_weights(chunks, hf_config))
    config, example = chunks[0].config, next(chunks[0].parameters())
    for name, shape in chunks[0].whole_shapes.items():
        if names is not None and name not in names:
            continue
        own_dtype = torch.float32 if name.endswith(EXPERT_BIAS) else config.params_dtype
        whole = torch.zeros(shape, dtype=dtype or own_dtype, device=example.device)
        for weight, piece in pieces[name]:
            if piece.is_owner:
                whole[piece.outside].copy_(value_of(weight)[piece.inside])
        group: Any = parallel_state.get_model_parallel_group()
        if ".mlp.experts." in name:
            group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        if dist.get_world_size(group) > 1:
            dist.all_reduce(whole.view(torch.uint8), group=group)
        yield name, whole
