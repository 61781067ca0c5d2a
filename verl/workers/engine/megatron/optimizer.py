"""The optimizer step of ranks that divide a model as Megatron does.

    parameter            its gradient is summed over                           counts in the norm
    matrix, divided      data and context ranks                                on each tensor rank
    norm, bias, whole    the same; with sequence parallelism tensor ranks too  on one tensor rank
    expert               ranks that hold a copy of it                          on each expert rank
    tied embedding       the same, and first and last pipeline stage           on the first stage

Losses are divided by counts over all ranks before they get here, so gradients are summed, never
averaged. With `use_distributed_optimizer` the ranks that sum a gradient keep a slice of its master
and moments each (ZeRO stage 1); otherwise each keeps them whole. Learning rate and weight decay
follow megatron-core's own schedule.
"""

# megatron-core's own annotations leave out or mix up types of groups and modules.
# pyright: reportArgumentType=false, reportOptionalOperand=false

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from torch import Tensor, nn

from verl.config.optimizer import FSDPOptimizerConfig, McoreOptimizerConfig
from verl.utils.distributed import all_reduce_
from verl.workers.engine.optimizer import MasterOptimizer, master_of
from verl.workers.engine.sharding import in_buckets, refuse_shape_dependent
from verl.workers.engine.zero1 import Slices, sum_gradients, take_gradients

TORCH_OPTIMIZERS = {"adam": "AdamW", "sgd": "SGD"}
"""Megatron's names: its Adam decays weights apart from the gradient."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where else a parameter of this rank is."""

    group: dist.ProcessGroup
    """Ranks with the same values and other tokens: gradients are summed over them."""

    num_copies: int
    """Ranks outside of `group` with the same values and the same gradient."""

    sums_over_tensor_ranks: bool
    is_tied: bool
    """Whether another pipeline stage has it too."""

    is_second: bool
    """Whether the norm counts it there."""


def places(chunk: GPTModel) -> Iterator[tuple[str, nn.Parameter, Place]]:
    """Every parameter of a chunk with its place."""
    sharded, experts = set[int](), set[int]()
    for module in chunk.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
            own = [p for p in module.parameters(recurse=False) if p is not None]
            is_row = isinstance(module, RowParallelLinear)
            sharded.update(id(p) for p in own if not (is_row and p.dim() == 1))
            if not isinstance(module, VocabParallelEmbedding) and module.is_expert:
                experts.update(map(id, own))
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for name, parameter in chunk.named_parameters():
        is_expert = id(parameter) in experts
        num_ranks = (
            parallel_state.get_expert_tensor_parallel_world_size()
            if is_expert
            else parallel_state.get_tensor_model_parallel_world_size()
        )
        marks = vars(parameter)
        is_norm_of_heads = ".q_layernorm." in name or ".k_layernorm." in name
        yield (
            name,
            parameter,
            Place(
                group=parallel_state.get_expert_data_parallel_group() if is_expert else dense,
                num_copies=1 if id(parameter) in sharded else num_ranks,
                sums_over_tensor_ranks=num_ranks > 1
                and (bool(marks.get("sequence_parallel")) or is_norm_of_heads),
                is_tied=bool(marks.get("shared_embedding")),
                is_second=bool(marks.get("shared")),
            ),
        )


class ParallelOptimizer(MasterOptimizer):
    """Masters of this rank's part of the weights, or of a slice of it."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        config: McoreOptimizerConfig | FSDPOptimizerConfig,
        *,
        is_sliced: bool,
        offload: bool = False,
    ) -> None:
        self.places: dict[str, Place] = {}
        named = list[tuple[str, nn.Parameter]]()
        self._place_of = dict[int, Place]()
        for number, chunk in enumerate(chunks):
            for name, parameter, place in places(chunk):
                named.append((f"{number}.{name}", parameter))
                self.places[f"{number}.{name}"] = self._place_of[id(parameter)] = place
        self._slices = {
            group: Slices(group)
            for group in {place.group for place in self.places.values()}
            if is_sliced and dist.get_world_size(group) > 1
        }
        settings = torch_settings(config)
        refuse_shape_dependent(settings)
        super().__init__(named, settings, offload=offload)
        if isinstance(config, McoreOptimizerConfig):
            self.schedule = MegatronSchedule(self.optimizer, config)  # pyright: ignore[reportAttributeAccessIssue]

    # ---- one step --------------------------------------------------------------------------------

    def _move_gradients_to_masters(self) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is None:  # an expert without tokens, on ranks that must all take part
                parameter.grad = torch.zeros_like(parameter)
        self._sum_what_others_compute()
        for group, names in self._buckets():
            gradients = take_gradients([self.parameters[name] for name in names])
            slices = self._slices.get(group)
            sums = slices.sum(gradients) if slices is not None else sum_in_fp32(gradients, group)
            for name, gradient in zip(names, sums, strict=True):
                self.masters[name].grad = gradient

    def _sum_what_others_compute(self) -> None:
        """Gradients of whole parameters of which each tensor rank saw a share of the tokens, and
        of the two copies of a tied embedding."""
        chosen = {n: p for n, p in self.parameters.items() if self.places[n].sums_over_tensor_ranks}
        if chosen:
            sum_gradients(chosen, parallel_state.get_tensor_model_parallel_group())
        tied = {n: p for n, p in self.parameters.items() if self.places[n].is_tied}
        if tied:
            sum_gradients(tied, parallel_state.get_embedding_group())

    def _clip_gradients(self, max_norm: float) -> float:
        """Each element counts once, on however many ranks it is."""
        device = next(iter(self.masters.values())).device
        square = torch.zeros((), dtype=torch.float64, device=device)
        for name, master in self.masters.items():
            place = self.places[name]
            if master.grad is None or place.is_second:
                continue
            is_whole = place.group not in self._slices
            copies = place.num_copies * (dist.get_world_size(place.group) if is_whole else 1)
            square += master.grad.norm().double().square() / copies
        norm = all_reduce_(square).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.masters.values(), max_norm, norm.float())
        return float(norm)

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        slices = self._slices.get(self._place_of[id(parameter)].group)
        if slices is None:
            return master_of(parameter)
        return nn.Parameter(slices.own(parameter.detach()).float().clone())

    def _write_back(self) -> None:
        for group, names in self._buckets():
            parameters, slices = [self.parameters[n] for n in names], self._slices.get(group)
            masters = [self.masters[name].detach() for name in names]
            if slices is not None:
                slices.gather(masters, parameters)
                continue
            for parameter, master in zip(parameters, masters, strict=True):
                if parameter.data_ptr() != master.data_ptr():
                    parameter.copy_(master)
        self._num_writes = self._count_writes()

    def _follow_others_writes(self) -> None:
        for name, count in self._count_writes().items():
            if count == self._num_writes[name]:
                continue
            parameter, master = self.parameters[name], self.masters[name]
            slices = self._slices.get(self.places[name].group)
            if slices is not None:
                master.copy_(slices.own(parameter))
            elif master is not parameter:
                master.copy_(parameter)

    def join(self, slices: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
        """Tensors in the shape of this rank's parameters, from the slices that ranks have."""
        for group, names in self._buckets():
            targets, parts = [into[name] for name in names], [slices[name] for name in names]
            found = self._slices.get(group)
            if found is not None:
                found.gather(parts, targets)
                continue
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part)

    def own_part(self, name: str, value: Tensor) -> Tensor:
        """What this rank keeps of a tensor in the shape of its parameter `name`."""
        slices = self._slices.get(self.places[name].group)
        return value if slices is None else slices.own(value)

    def _buckets(self) -> Iterator[tuple[dist.ProcessGroup, list[str]]]:
        """Parameters that share a collective, in one order on the ranks of its group."""
        for group in dict.fromkeys(place.group for place in self.places.values()):
            members = {n: p for n, p in self.parameters.items() if self.places[n].group is group}
            for names in in_buckets(members):
                yield group, names


def sum_in_fp32(gradients: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The sums over ranks, one collective for all."""
    if dist.get_world_size(group) == 1:
        return [gradient.float() for gradient in gradients]
    flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
    sums = all_reduce_(flat, group=group).split([gradient.numel() for gradient in gradients])
    return [part.view_as(gradient) for part, gradient in zip(sums, gradients, strict=True)]


def torch_settings(config: McoreOptimizerConfig | FSDPOptimizerConfig) -> FSDPOptimizerConfig:
    """The torch optimizer that Megatron's name stands for."""
    if isinstance(config, FSDPOptimizerConfig):
        return config
    if config.optimizer not in TORCH_OPTIMIZERS:
        known = ", ".join(TORCH_OPTIMIZERS)
        raise ValueError(f"optim.optimizer is {config.optimizer!r}; there are {known}")
    return FSDPOptimizerConfig(
        optimizer=TORCH_OPTIMIZERS[config.optimizer],
        lr=config.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
    )


class MegatronSchedule:
    """megatron-core's schedule of learning rate and weight decay, one step per training step."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: McoreOptimizerConfig) -> None:
        total = max(config.total_training_steps, 1)
        warmup = config.lr_warmup_steps
        if warmup < 0:
            warmup = int(config.lr_warmup_steps_ratio * total)
        decay = config.lr_decay_steps or total
        self._schedule = OptimizerParamScheduler(
            optimizer,  # pyright: ignore[reportArgumentType]
            init_lr=config.lr_warmup_init,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=max(decay, warmup + 1),
            lr_decay_style=config.lr_decay_style.replace("_", "-"),
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=total,
            wd_incr_style=config.weight_decay_incr_style,
            use_checkpoint_opt_param_scheduler=config.use_checkpoint_opt_param_scheduler,
            override_opt_param_scheduler=not config.use_checkpoint_opt_param_scheduler,
            wsd_decay_steps=config.lr_wsd_decay_steps,
            lr_wsd_decay_style=config.lr_wsd_decay_style,
        )

    def step(self) -> None:
        self._schedule.step(1)

    def state_dict(self) -> dict[str, Any]:
        """As torch's schedules write it, so that another engine can continue; with it Megatron's
        own values."""
        own = self._schedule
        return {
            "base_lrs": [own.max_lr],
            "last_epoch": own.num_steps,
            "_step_count": own.num_steps + 1,
            "_last_lr": [own.get_lr(own.optimizer.param_groups[0])],
            "lr_lambdas": [None],
            "megatron": own.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self._schedule
        if own.use_checkpoint_opt_param_scheduler and "megatron" in state:
            own.load_state_dict(state["megatron"])
            return
        own.num_steps = 0
        own.step(int(state["last_epoch"]))
