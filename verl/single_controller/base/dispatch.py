"""How the arguments of a call are split over the ranks, and the results joined.

A dispatch function takes `(worker_group, *args, **kwargs)` and returns `(args, kwargs)` in which
each value is a list with one entry per rank. A collect function takes `(worker_group, output)`,
where `output` is a list with one result (or reference to one) per rank. Batches are cut and joined
by `split` and `join`, which know `DataProto`, `DataProtoFuture` and `TensorDict`; another kind of
batch is added with `split.register(...)` and `join.register(...)`.

Splitting over a mesh, where several ranks share a part, is in `mesh_dispatch`.
"""

from collections.abc import Callable, Sequence
from functools import partial, singledispatch
from types import FunctionType
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from verl.protocol import BatchError, DataProto, DataProtoFuture, pad_dataproto_to_divisor
from verl.protocol.ops import concat_meta_info
from verl.single_controller.base.modes import PADDING_KEY
from verl.utils import tensordict_utils

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


# ---- batches -------------------------------------------------------------------------------------


@singledispatch
def split(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into `parts` equal pieces of consecutive rows that share its storage."""
    raise BatchError(
        f"only batches (DataProto, DataProtoFuture, TensorDict) can be split over {parts} ranks, "
        f"got {type(batch).__name__}; put plain values into meta_info"
    )


@split.register
def _(batch: DataProto, parts: int) -> list[Any]:
    if parts == 1:
        return [shallow_copy(batch)]
    require_divisible(len(batch), parts)
    return batch.chunk(parts)


@split.register
def _(batch: DataProtoFuture, parts: int) -> list[Any]:
    return [batch] if parts == 1 else batch.chunk(parts)


@split.register
def _(batch: TensorDictBase, parts: int) -> list[Any]:
    if parts == 1:
        return [batch.copy()]
    require_divisible(len(batch), parts)
    return list(tensordict_utils.chunk_tensordict(batch, parts))


def require_divisible(rows: int, parts: int) -> None:
    if rows % parts:
        raise BatchError(
            f"a batch of {rows} rows cannot be split evenly over {parts} ranks; pad it with "
            f"pad_dataproto_to_divisor(batch, {parts}), or build it with auto_padding=True"
        )


def shallow_copy(batch: DataProto) -> DataProto:
    """The same tensors in new containers, so that what a worker adds or pops stays its own."""
    tensors = None if batch.batch is None else batch.batch.copy()
    return type(batch)(
        batch=tensors,
        non_tensor_batch=dict(batch.non_tensor_batch),
        meta_info=dict(batch.meta_info),
    )


@singledispatch
def join(first: Any, parts: Sequence[Any]) -> Any:
    """Join the parts that the ranks returned, of which `first` is the first and shows the type."""
    raise BatchError(
        f"this dispatch mode joins batches (DataProto or TensorDict), but a rank returned "
        f"{type(first).__name__}; return a batch, or use a mode that gives a list per rank"
    )


@join.register
def _(first: DataProto, parts: Sequence[Any]) -> Any:
    if len(parts) > 1:
        return DataProto.concat(list(parts))
    whole = shallow_copy(first)  # as concat would give, without copying tensors
    whole.meta_info = concat_meta_info([first.meta_info])
    return whole


@join.register
def _(first: TensorDictBase, parts: Sequence[Any]) -> Any:
    return first if len(parts) == 1 else tensordict_utils.concat_tensordict(list(parts))


def collect_batches(
    worker_group: "WorkerGroup", output: Sequence[Any], positions: Sequence[int]
) -> Any:
    """Join the results at `positions`, or give a future of the join when they are references."""
    parts = [output[position] for position in positions]
    if not parts:
        raise BatchError("no rank of this mesh collects its result; there is nothing to join")
    if isinstance(parts[0], worker_group.reference_type):
        return worker_group.future_of(list(output), list(positions))
    kinds = {type(part).__name__ for part in parts}
    if len(kinds) > 1:
        raise BatchError(f"the ranks returned different types, which cannot be joined: {kinds}")
    return join(parts[0], parts)


def map_arguments(change: Callable[[Any], Any], args: Sequence[Any], kwargs: dict) -> Arguments:
    return tuple(change(arg) for arg in args), {key: change(arg) for key, arg in kwargs.items()}


# ---- replicate, pass through, one entry per rank -------------------------------------------------


def dispatch_one_to_all(worker_group: "WorkerGroup", *args: Any, **kwargs: Any) -> Arguments:
    world_size = worker_group.world_size
    return map_arguments(lambda arg: [arg] * world_size, args, kwargs)


def dispatch_all_to_all(worker_group: "WorkerGroup", *args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


def collect_all_to_all(worker_group: "WorkerGroup", output: list[Any]) -> list[Any]:
    return output


def dispatch_dp_compute(worker_group: "WorkerGroup", *args: Any, **kwargs: Any) -> Arguments:
    """The caller has split the arguments: each is a list with one entry per rank."""
    for arg in (*args, *kwargs.values()):
        if not isinstance(arg, (list, tuple)) or len(arg) != worker_group.world_size:
            shown = f"{len(arg)} entries" if isinstance(arg, (list, tuple)) else type(arg).__name__
            raise BatchError(
                f"DP_COMPUTE needs lists with one entry per rank ({worker_group.world_size}), "
                f"got {shown}"
            )
    return map_arguments(list, args, kwargs)


def collect_dp_compute(worker_group: "WorkerGroup", output: list[Any]) -> list[Any]:
    if len(output) != worker_group.world_size:
        raise BatchError(f"{len(output)} results for {worker_group.world_size} ranks")
    return output


def direct_rollout_call(worker_group: "WorkerGroup", *args: Any, **kwargs: Any) -> Arguments:
    raise NotImplementedError(
        "a DIRECT_ROLLOUT_METHOD is called on the rollout worker itself, not through its group"
    )


# ---- batches over all ranks ----------------------------------------------------------------------


def dispatch_dp_compute_data_proto(
    worker_group: "WorkerGroup", *args: Any, **kwargs: Any
) -> Arguments:
    """Cut every batch over all ranks. Batches with auto-padding are filled up first."""
    return split_with_padding(worker_group.world_size, args, kwargs)


def dispatch_dp_compute_data_proto_with_func(
    worker_group: "WorkerGroup", *args: Any, **kwargs: Any
) -> Arguments:
    """The first argument is a function that every rank gets; the others are cut, never padded."""
    if not args or not isinstance(args[0], (FunctionType, partial)):
        shown = type(args[0]).__name__ if args else "nothing"
        raise BatchError(f"the first argument must be a plain function, got {shown}")
    world_size = worker_group.world_size
    parts, keyword_parts = map_arguments(lambda arg: split(arg, world_size), args[1:], kwargs)
    return ([args[0]] * world_size, *parts), keyword_parts


def collect_dp_compute_data_proto(worker_group: "WorkerGroup", output: list[Any]) -> Any:
    return collect_batches(worker_group, output, range(len(output)))


def split_with_padding(parts: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """`split` every argument; the rows added to make them divisible are counted in PADDING_KEY."""
    lengths = {len(arg) for arg in (*args, *kwargs.values()) if wants_padding(arg)}
    if len(lengths) > 1:
        raise BatchError(
            f"batches with auto-padding must have equally many rows, got {sorted(lengths)}"
        )
    padding = -lengths.pop() % parts if lengths else 0

    def cut(arg: Any) -> list[Any]:
        padded = pad_dataproto_to_divisor(arg, parts)[0] if padding and wants_padding(arg) else arg
        return split(padded, parts)

    pieces, keyword_pieces = map_arguments(cut, args, kwargs)
    if padding:
        keyword_pieces[PADDING_KEY] = padding
    return pieces, keyword_pieces


def wants_padding(arg: Any) -> bool:
    return isinstance(arg, DataProto) and arg.is_padding_enabled()
