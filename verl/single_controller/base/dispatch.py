"""How the arguments of a call are split over the ranks, and the results joined.

A dispatch function takes `(worker_group, *args, **kwargs)` and returns `(args, kwargs)` in which
each value is a list with one entry per rank. A collect function takes `(worker_group, output)`,
where `output` is a list with one result (or reference to one) per rank. `Dispatch` and `Execute`
name the modes, to which users may add; which functions belong to which mode is in
`decorator.DISPATCH_MODE_FN_REGISTRY`. Batches are split and joined by `split` and `join`, which
know `DataProto`, `DataProtoFuture` and `TensorDict`; another kind of batch is added with
`split.register(...)`, `narrow.register(...)` and `join.register(...)`.

In a mesh the ranks of one data-parallel group share a part of the batch. A worker registers for
each mesh its data-parallel rank and whether its result counts
(`Worker._register_dispatch_collect_info`); the group asks once. A batch is split into as many parts
as there are data-parallel ranks, each part is transported once and given to every rank of its
group, and the results of the collecting ranks are joined in the order of the parts.
"""

from collections.abc import Callable, Sequence
from functools import partial, singledispatch
from types import FunctionType
from typing import TYPE_CHECKING, Any

from tensordict import NonTensorData, TensorDictBase

from verl.protocol import BatchError, DataProto, DataProtoFuture, pad_dataproto_to_divisor
from verl.protocol.ops import concat_meta_info
from verl.utils import tensordict_utils

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup
from typing import ClassVar

from verl.utils.py_functional import DynamicEnum

MAGIC_ATTR = "attrs_3141562937"
"""The attribute of a method that holds what `register` was told."""

PADDING_KEY = "_padding_size_key_x123d"
"""The keyword in which a dispatch function tells how many rows it added; never sent to a worker."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Dispatch(DynamicEnum):
    """How arguments are split over the ranks and results are joined."""

    RANK_ZERO: ClassVar["Dispatch"]
    ONE_TO_ALL: ClassVar["Dispatch"]
    ALL_TO_ALL: ClassVar["Dispatch"]
    DP_COMPUTE: ClassVar["Dispatch"]
    DP_COMPUTE_PROTO: ClassVar["Dispatch"]
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar["Dispatch"]
    DP_COMPUTE_METRIC: ClassVar["Dispatch"]
    DIRECT_ROLLOUT_METHOD: ClassVar["Dispatch"]


class Execute(DynamicEnum):
    """Which ranks run the method."""

    ALL: ClassVar["Execute"]
    RANK_ZERO: ClassVar["Execute"]


for _enumeration in (Dispatch, Execute):
    for _name in _enumeration.__annotations__:
        _enumeration.register(_name)


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
def is_reference(arg: Any) -> bool:
    """Whether it stands for a value that the worker's method gets in its place."""
    return False


@is_reference.register
def _(arg: DataProtoFuture) -> bool:
    return True


@singledispatch
def narrow(arg: Any, columns: Sequence[str]) -> Any:
    """Of a batch only these columns, those that it has; anything else as it is."""
    return arg


@narrow.register
def _(arg: DataProto, columns: Sequence[str]) -> Any:
    tensors = [] if arg.batch is None else [key for key in columns if key in arg.batch]
    arrays = [key for key in columns if key in arg.non_tensor_batch]
    return arg.select(batch_keys=tensors, non_tensor_batch_keys=arrays)


@narrow.register
def _(arg: TensorDictBase, columns: Sequence[str]) -> Any:
    whole_batch = [key for key, value in arg.items() if isinstance(value, NonTensorData)]
    return arg.select(*columns, *whole_batch, strict=False)


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


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """The dispatch mode for a method that works on the mesh called `mesh_name`."""
    return {
        "dispatch_fn": partial(dispatch_lazy_compute_data_proto, mesh_name),
        "collect_fn": partial(collect_lazy_compute_data_proto, mesh_name),
    }


def dispatch_lazy_compute_data_proto(
    mesh_name: str, worker_group: "WorkerGroup", *args: Any, **kwargs: Any
) -> Arguments:
    dp_ranks = worker_group.mesh_dp_ranks(mesh_name)
    dp_size = max(dp_ranks) + 1
    return dispatch_nd_compute_dataproto(dp_ranks, dp_size, worker_group, *args, **kwargs)


def collect_lazy_compute_data_proto(
    mesh_name: str, worker_group: "WorkerGroup", output: list[Any]
) -> Any:
    """Join the collecting ranks' results by data-parallel rank, so rows return in their order."""
    mask = worker_group.mesh_collect_mask(mesh_name)
    ranks = collect_nd_compute(mask, worker_group, list(range(len(output))))
    ranks.sort(key=worker_group.mesh_dp_ranks(mesh_name).__getitem__)
    return collect_batches(worker_group, output, ranks)


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: Sequence[int],
    dp_size: int,
    worker_group: "WorkerGroup",
    *args: Any,
    **kwargs: Any,
) -> Arguments:
    parts, keyword_parts = split_with_padding(dp_size, args, kwargs)
    return dispatch_nd_compute(dp_rank_mapping, dp_size, worker_group, *parts, **keyword_parts)


def dispatch_nd_compute(
    dp_rank_mapping: Sequence[int],
    dp_size: int,
    worker_group: "WorkerGroup",
    *args: Any,
    **kwargs: Any,
) -> Arguments:
    """Of each argument, a list of `dp_size` parts, give part `dp_rank_mapping[rank]` to a rank."""
    if len(dp_rank_mapping) != worker_group.world_size:
        raise BatchError(
            f"the mesh names a data-parallel rank for {len(dp_rank_mapping)} workers, "
            f"but the group has {worker_group.world_size}"
        )
    padding = kwargs.pop(PADDING_KEY, 0)

    def place(parts: Any) -> list[Any]:
        if not isinstance(parts, (list, tuple)) or len(parts) != dp_size:
            raise BatchError(f"each argument must be a list of {dp_size} parts, got {parts!r:.80}")
        shared = list(parts)
        if not isinstance(shared[0], DataProtoFuture):  # a future is only a handle already
            shared = worker_group.put_once(shared)
        return [shared[dp_rank] for dp_rank in dp_rank_mapping]

    placed, keyword_placed = map_arguments(place, args, kwargs)
    if padding:
        keyword_placed[PADDING_KEY] = padding
    return placed, keyword_placed


def collect_nd_compute(
    collect_mask: Sequence[bool], worker_group: "WorkerGroup", output: list[Any]
) -> list[Any]:
    """The results of the ranks whose collect flag is true."""
    if len(collect_mask) != len(output):
        raise BatchError(f"{len(output)} results for a collect mask of {len(collect_mask)} ranks")
    return [result for result, counts in zip(output, collect_mask, strict=True) if counts]


def collect_nd_compute_dataproto(
    collect_mask: Sequence[bool], worker_group: "WorkerGroup", output: list[Any]
) -> Any:
    ranks = collect_nd_compute(collect_mask, worker_group, list(range(len(output))))
    return collect_batches(worker_group, output, ranks)
