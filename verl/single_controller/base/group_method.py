"""One method of a worker group: what happens between the user's call and the result.

`bind_method` reads the note that `register` left and puts together the dispatch, execute and
collect functions; `group_method` runs them in order. Where the only rank is this process, execute
is a plain call of the worker's method: two frames lie between the caller and the method. Rows that
dispatch added to make a batch divisible are taken away here, so neither workers nor users see that
count.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tensordict import NonTensorData, TensorDictBase

from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.base.backend import Share
from verl.single_controller.base.decorator import get_predefined_execute_fn, mode_functions
from verl.single_controller.base.dispatch import (
    Arguments,
    collect_all_to_all,
    collect_dp_compute,
    dispatch_all_to_all,
    map_arguments,
)
from verl.single_controller.base.futures import GroupFuture
from verl.single_controller.base.modes import PADDING_KEY, Dispatch, Execute
from verl.utils import tensordict_utils

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup

Function = Callable[..., Any]


def bind_method(
    group: "WorkerGroup", method_name: str, note: dict[str, Any], func_generator: Function
) -> Function:
    dispatch_mode, execute_mode = note["dispatch_mode"], note["execute_mode"]
    if dispatch_mode is Dispatch.RANK_ZERO:  # a name without functions: rank zero gets everything
        dispatch_mode, execute_mode = Dispatch.ALL_TO_ALL, Execute.RANK_ZERO
    functions = mode_functions(dispatch_mode)
    dispatch_fn, collect_fn = functions["dispatch_fn"], functions["collect_fn"]
    if execute_mode is Execute.RANK_ZERO and not isinstance(dispatch_mode, dict):
        collect_fn = collect_all_to_all  # there is one result, and it is the answer
        if dispatch_fn is not dispatch_all_to_all:
            dispatch_fn = _for_rank_zero(dispatch_fn)
    if "columns" in note:
        dispatch_fn = _narrowed(dispatch_fn, note["columns"])
    return func_generator(
        group,
        method_name,
        dispatch_fn=dispatch_fn,
        collect_fn=collect_fn,
        execute_fn=getattr(group, get_predefined_execute_fn(execute_mode)["execute_fn_name"]),
        blocking=note["blocking"],
    )


def group_method(
    group: "WorkerGroup",
    method_name: str,
    dispatch_fn: Function,
    collect_fn: Function,
    execute_fn: Function,
    blocking: bool,
) -> Function:
    backend = group._backend
    is_for_all = execute_fn == group.execute_all
    is_direct = (
        blocking
        and backend.is_this_process
        and (is_for_all or execute_fn == group.execute_rank_zero)
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = dispatch_fn(group, *args, **kwargs)
        padding = kwargs.pop(PADDING_KEY, 0)
        started = group.start_call(method_name)
        if is_direct and not group._holds_futures(args, kwargs):
            function = backend.method_here(group._role, method_name)
            share = group._shares(args, kwargs)[0] if is_for_all else Share(0, args, kwargs)
            reference = backend.run_here(started, function, share)
            output = [reference] if is_for_all else reference
        else:
            output = execute_fn(method_name, *args, **kwargs)
        if blocking:
            output = group.resolve(output, started)
        output = collect_fn(group, output)
        if isinstance(output, GroupFuture):
            output.call = started
        is_per_rank = collect_fn in (collect_dp_compute, collect_all_to_all)
        return output if is_per_rank or not padding else without_padding(output, padding)

    call.__name__ = method_name
    return call


def _for_rank_zero(dispatch_fn: Function) -> Function:
    """Of arguments that are split over all ranks, rank zero gets its own share."""

    def dispatch(group: "WorkerGroup", *args: Any, **kwargs: Any) -> Arguments:
        args, kwargs = dispatch_fn(group, *args, **kwargs)
        kwargs.pop(PADDING_KEY, 0)
        return map_arguments(lambda shares: shares[0], args, kwargs)

    return dispatch


def _narrowed(dispatch_fn: Function, columns: Sequence[str]) -> Function:
    """Only the columns that the method reads travel."""

    def narrow(arg: Any) -> Any:
        if isinstance(arg, DataProto):
            tensors = [] if arg.batch is None else [key for key in columns if key in arg.batch]
            arrays = [key for key in columns if key in arg.non_tensor_batch]
            return arg.select(batch_keys=tensors, non_tensor_batch_keys=arrays)
        if isinstance(arg, TensorDictBase):
            whole_batch = [key for key, value in arg.items() if isinstance(value, NonTensorData)]
            return arg.select(*columns, *whole_batch, strict=False)
        return arg

    def dispatch(group: "WorkerGroup", *args: Any, **kwargs: Any) -> Arguments:
        args, kwargs = map_arguments(narrow, args, kwargs)
        return dispatch_fn(group, *args, **kwargs)

    return dispatch


def without_padding(output: Any, padding: int) -> Any:
    """Drop the last `padding` rows, which dispatch had added; of a future, once it is resolved."""
    if isinstance(output, DataProtoFuture):
        return replace(output, dispatch_fn=partial(without_padding, padding=padding))
    if isinstance(output, TensorDictBase):
        return tensordict_utils.unpad(output, padding)
    return output[:-padding] if isinstance(output, (DataProto, list)) else output
