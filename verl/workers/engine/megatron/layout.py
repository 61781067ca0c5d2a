"""How a Megatron engine divides its ranks, and whether a model divides likewise.

With R ranks and sizes t (tensor), p (pipeline), c (context), e (experts), u (tensor of an expert):

    dense layers   R = t * p * c * data
    experts        R = u * e * p * (copies of an expert)

A tensor group shares each matrix by heads, by KV heads and by columns of the MLP; a pipeline stage
holds a run of layers, or `virtual_pipeline` runs; an expert group shares the experts of a layer.
Neither torch nor megatron-core is needed here, so a plan can be checked before anything loads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.engine import McoreEngineConfig
from verl.config.faults import ConfigError, Fault, nearest_divisors, nearest_multiples

UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Fields of Megatron's configuration that give stages unequal numbers of layers."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups."""

    tensor: int
    pipeline: int
    virtual_pipeline: int | None
    context: int
    expert: int
    expert_tensor: int
    data: int

    @classmethod
    def of(cls, engine: McoreEngineConfig, num_ranks: int) -> "Layout":
        """The layout of `num_ranks` ranks; refused if they cannot be divided so."""
        tensor, pipeline = engine.tensor_model_parallel_size, engine.pipeline_model_parallel_size
        context, expert = engine.context_parallel_size, engine.expert_model_parallel_size
        expert_tensor = engine.expert_tensor_parallel_size or tensor
        faults = list(rank_faults(num_ranks, tensor, pipeline, context, expert, expert_tensor))
        if faults:
            raise ConfigError([Fault(text) for text in faults])
        return cls(
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=engine.virtual_pipeline_model_parallel_size,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
            data=num_ranks // (tensor * pipeline * context),
        )

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    def data_rank(self, rank: int) -> int:
        """Which of the data-parallel shards of the rows a rank gets; ranks count up in the order
        tensor, context, data, pipeline."""
        return rank // (self.tensor * self.context) % self.data

    def leads(self, rank: int) -> bool:
        """Whether a rank's results stand for those of all ranks with the same rows."""
        return rank % (self.tensor * self.context) == 0 and rank < self.num_ranks // self.pipeline

    def __str__(self) -> str:
        sizes = [f"tensor {self.tensor}", f"pipeline {self.pipeline}"]
        if self.virtual_pipeline:
            sizes[-1] += f" x {self.virtual_pipeline} virtual"
        sizes += [f"context {self.context}", f"data {self.data}"]
        if self.expert > 1 or self.expert_tensor != self.tensor:
            sizes.append(f"experts over {self.expert} (tensor {self.expert_tensor})")
        return ", ".join(sizes)


def rank_faults(
    num_ranks: int, tensor: int, pipeline: int, context: int, expert: int, expert_tensor: int
) -> Iterator[str]:
    dense = tensor * pipeline * context
    if num_ranks % dense:
        yield (
            "megatron: tensor_model_parallel_size * pipeline_model_parallel_size * "
            f"context_parallel_size ({tensor} * {pipeline} * {context} = {dense}) must divide the "
            f"{num_ranks} ranks of the role; the nearest numbers of ranks are "
            f"{nearest_multiples(num_ranks, dense)}, the nearest products "
            f"{nearest_divisors(dense, num_ranks)}"
        )
    sparse = expert_tensor * expert * pipeline
    if num_ranks % sparse:
        yield (
            "megatron: expert_tensor_parallel_size * expert_model_parallel_size * "
            f"pipeline_model_parallel_size ({expert_tensor} * {expert} * {pipeline} = {sparse}) "
            f"must divide the {num_ranks} ranks of the role; the nearest products are "
            f"{nearest_divisors(sparse, num_ranks)}. expert_tensor_parallel_size is "
            "tensor_model_parallel_size where it is not stated"
        )


def check_layout(layout: Layout, engine: McoreEngineConfig, model: Any) -> None:
    """Refuse a layout that does not divide the model with this Hugging Face configuration.

    Stages that `engine.override_transformer_config` makes unequal are left to megatron-core to
    check.
    """
    text = model.get_text_config()
    faults = [*tensor_faults(layout, text), *expert_faults(layout, text)]
    faults += stage_faults(layout, text, engine.override_transformer_config)
    faults += sequence_faults(layout, engine, text)
    if faults:
        raise ConfigError([Fault(fault) for fault in faults])


def tensor_faults(layout: Layout, model: Any) -> Iterator[str]:
    names = {
        "num_attention_heads": "attention heads",
        "num_key_value_heads": "KV heads",
        "intermediate_size": "columns of the MLP",
    }
    if is_latent(model):
        del names["num_key_value_heads"]  # each query head has a key and a value of its own
    for name, meaning in names.items():
        size = model.to_dict()[name]
        if size % layout.tensor:
            yield must_divide("tensor_model_parallel_size", layout.tensor, size, meaning)
    heads, product = model.num_attention_heads, layout.tensor * layout.context
    if layout.context > 1 and heads % layout.tensor == 0 and heads % product:
        yield (
            f"megatron: tensor_model_parallel_size * context_parallel_size ({layout.tensor} * "
            f"{layout.context} = {product}) must divide the model's {heads} attention heads, which "
            f"context ranks share out: the nearest products are {nearest_divisors(product, heads)}"
        )


def expert_faults(layout: Layout, model: Any) -> Iterator[str]:
    experts = num_experts(model)
    if experts is None:
        if layout.expert > 1:
            yield (
                f"megatron: expert_model_parallel_size is {layout.expert}, but "
                f"{model.model_type} has no experts; set it to 1"
            )
        return
    if experts % layout.expert:
        yield must_divide("expert_model_parallel_size", layout.expert, experts, "experts")
    width = expert_width(model)
    if width % layout.expert_tensor:
        yield must_divide(
            "expert_tensor_parallel_size", layout.expert_tensor, width, "columns of an expert"
        )


def stage_faults(layout: Layout, model: Any, overrides: Mapping[str, Any]) -> Iterator[str]:
    virtual = layout.virtual_pipeline or 1
    if virtual > 1 and layout.pipeline == 1:
        yield (
            f"megatron: virtual_pipeline_model_parallel_size is {virtual}, but there is one "
            "pipeline stage; set it to null or raise pipeline_model_parallel_size"
        )
    if any(overrides.get(name) for name in UNEVEN_STAGES):
        return
    layers = model.num_hidden_layers
    if layers % (layout.pipeline * virtual):
        stages = f"pipeline_model_parallel_size ({layout.pipeline})"
        if virtual > 1:
            stages += f" * virtual_pipeline_model_parallel_size ({virtual})"
        yield (
            f"megatron: {stages} must divide the model's {layers} layers; the nearest products "
            f"are {nearest_divisors(layout.pipeline * virtual, layers)}. Unequal stages are "
            "stated by override_transformer_config.num_layers_in_first_pipeline_stage and "
            "num_layers_in_last_pipeline_stage"
        )


def sequence_faults(layout: Layout, engine: McoreEngineConfig, model: Any) -> Iterator[str]:
    """Experts and latent attention have parts that are whole on each tensor rank; their gradients
    are sums over ranks with different tokens."""
    if layout.tensor == 1 or engine.sequence_parallel:
        return
    for is_there, what in (
        (num_experts(model) is not None, "experts"),
        (is_latent(model), "latent attention"),
    ):
        if is_there:
            yield (
                "megatron: sequence_parallel is False and tensor_model_parallel_size "
                f"{layout.tensor}, but {model.model_type} has {what}, which megatron-core trains "
                "on several tensor ranks with sequence parallelism only; set it to True"
            )


def must_divide(key: str, size: int, number: int, meaning: str) -> str:
    nearest = nearest_divisors(size, number)
    return f"megatron: {key} ({size}) must divide the model's {number} {meaning}: {nearest}"


def is_latent(model: Any) -> bool:
    """Whether keys and values are compressed (multi-head latent attention), without KV heads."""
    return "kv_lora_rank" in model.to_dict()


def num_experts(model: Any) -> int | None:
    """Routed experts per layer of a Hugging Face configuration; None: a dense model."""
    values = model.to_dict()
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    return next((values[name] for name in names if values.get(name)), None)


def expert_width(model: Any) -> int:
    values = model.to_dict()
    return values.get("moe_intermediate_size") or values["intermediate_size"]


def padded_vocabulary(model: Any, tensor: int) -> int:
    """Rows of the embedding and the output layer over all ranks of a tensor group.

    Rows past `vocab_size` are zero and belong to no token: leave their logits out of a softmax.
    """
    return -(-model.vocab_size // tensor) * tensor
