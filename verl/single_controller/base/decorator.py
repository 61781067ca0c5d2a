"""`register`: how a worker's method says in what way its group splits, runs and joins it.

The decorator only leaves a note on the method (under `MAGIC_ATTR`); `WorkerGroup` reads the notes
of its class and offers one method of the same name for each. On the worker the decorated method
receives the value of every `DataProtoFuture` argument, so results of one group can be passed to
another without visiting the driver.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from types import MethodType
from typing import Any, TypeVar

from verl.protocol import DataProtoFuture
from verl.protocol.transport import DEFAULT_TIMEOUT_SECONDS
from verl.single_controller.base.dispatch import (
    MAGIC_ATTR,
    Dispatch,
    Execute,
    collect_all_to_all,
    collect_dp_compute,
    collect_dp_compute_data_proto,
    collect_lazy_compute_data_proto,
    collect_nd_compute,
    collect_nd_compute_dataproto,
    direct_rollout_call,
    dispatch_all_to_all,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_lazy_compute_data_proto,
    dispatch_nd_compute,
    dispatch_nd_compute_dataproto,
    dispatch_one_to_all,
    make_nd_compute_dataproto_dispatch_fn,
    map_arguments,
)
from verl.single_controller.base.futures import resolve_futures

__all__ = [
    "DISPATCH_MODE_FN_REGISTRY",
    "MAGIC_ATTR",
    "Dispatch",
    "Execute",
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "collect_lazy_compute_data_proto",
    "collect_nd_compute",
    "collect_nd_compute_dataproto",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_lazy_compute_data_proto",
    "dispatch_nd_compute",
    "dispatch_nd_compute_dataproto",
    "dispatch_one_to_all",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "registered_methods",
    "update_dispatch_mode",
]

PLAIN_METHOD = "plain_method"
"""The attribute of a decorated method that holds the decorated and the plain one; a wrapper around
it has a copy, which says by the first that it is not meant."""

Method = TypeVar("Method", bound=Callable[..., Any])
ModeFunctions = dict[str, Callable[..., Any]]


def _functions(dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> ModeFunctions:
    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


DISPATCH_MODE_FN_REGISTRY: dict[Dispatch, ModeFunctions] = {
    Dispatch.ONE_TO_ALL: _functions(dispatch_one_to_all, collect_all_to_all),
    Dispatch.ALL_TO_ALL: _functions(dispatch_all_to_all, collect_all_to_all),
    Dispatch.DP_COMPUTE: _functions(dispatch_dp_compute, collect_dp_compute),
    Dispatch.DP_COMPUTE_PROTO: _functions(
        dispatch_dp_compute_data_proto, collect_dp_compute_data_proto
    ),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: _functions(
        dispatch_dp_compute_data_proto_with_func, collect_dp_compute_data_proto
    ),
    Dispatch.DP_COMPUTE_METRIC: _functions(dispatch_dp_compute_data_proto, collect_dp_compute),
    Dispatch.DIRECT_ROLLOUT_METHOD: _functions(direct_rollout_call, direct_rollout_call),
}

EXECUTE_MODE_FN_REGISTRY: dict[Execute, dict[str, str]] = {
    Execute.ALL: {"execute_fn_name": "execute_all"},
    Execute.RANK_ZERO: {"execute_fn_name": "execute_rank_zero"},
}


def register(
    dispatch_mode: Dispatch | ModeFunctions = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    columns: Sequence[str] | None = None,
) -> Callable[[Method], Method]:
    """Offer a worker's method, sync or async, on its worker group.

    `columns` names the tensors and arrays of a batch that the method reads: only those are sent
    (those of them that the batch has, and `meta_info`). Left out, the whole batch is.
    """
    _check_dispatch_mode(dispatch_mode)
    _check_execute_mode(execute_mode)
    note: dict[str, Any] = {
        "dispatch_mode": dispatch_mode,
        "execute_mode": execute_mode,
        "blocking": blocking,
    }
    if columns is not None:
        note["columns"] = tuple(columns)
    if not materialize_futures:
        note["materialize_futures"] = False

    def decorate(method: Method) -> Method:
        wrapper = _resolving(method) if materialize_futures else method
        setattr(wrapper, MAGIC_ATTR, note)
        return wrapper  # pyright: ignore[reportReturnType]

    return decorate


@lru_cache(maxsize=256)
def registered_methods(worker_class: type) -> dict[str, dict[str, Any]]:
    """What `register` noted for each method of a class, its bases included."""
    functions = inspect.getmembers(worker_class, inspect.isfunction)
    return {
        name: vars(function)[MAGIC_ATTR]
        for name, function in functions
        if MAGIC_ATTR in vars(function)
    }


def _resolving(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = resolve_futures(*map_arguments(_value, args, kwargs))
        return method(*args, **kwargs)

    @wraps(method)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = resolve_futures(*map_arguments(_value, args, kwargs))
        return await method(*args, **kwargs)

    wrapper: Any = call_async if inspect.iscoroutinefunction(method) else call
    vars(wrapper)[PLAIN_METHOD] = wrapper, method
    del wrapper.__wrapped__  # Ray would look through it, at a signature that refuses parts
    wrapper.__signature__ = _with_any_keyword(inspect.signature(method))
    return wrapper


def plain_method(bound: Callable[..., Any]) -> Callable[..., Any]:
    """The method below the decorators that put values in the place of references, for a call whose
    arguments are none (`is_reference`).

    A method that is decorated otherwise, or replaced, is given back as it is.
    """
    if not isinstance(bound, MethodType):
        return bound
    function = bound.__func__
    while PLAIN_METHOD in vars(function) and vars(function)[PLAIN_METHOD][0] is function:
        function = vars(function)[PLAIN_METHOD][1]
    return MethodType(function, bound.__self__)


def _with_any_keyword(signature: inspect.Signature) -> inspect.Signature:
    """Ray checks arguments against the signature, and parts of futures come as further keywords."""
    parameters = list(signature.parameters.values())
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        parameters.append(inspect.Parameter("parts", inspect.Parameter.VAR_KEYWORD))
    return signature.replace(parameters=parameters)


def _value(arg: Any) -> Any:
    return arg.get(DEFAULT_TIMEOUT_SECONDS) if isinstance(arg, DataProtoFuture) else arg


# ---- modes ---------------------------------------------------------------------------------------


def get_predefined_dispatch_fn(dispatch_mode: Dispatch) -> ModeFunctions:
    if dispatch_mode not in DISPATCH_MODE_FN_REGISTRY:
        raise ValueError(f"{dispatch_mode!r} has no dispatch and collect functions")
    return DISPATCH_MODE_FN_REGISTRY[dispatch_mode]


def get_predefined_execute_fn(execute_mode: Execute) -> dict[str, str]:
    """`{"execute_fn_name": ...}`, the method of the worker group that runs the mode."""
    _check_execute_mode(execute_mode)
    return EXECUTE_MODE_FN_REGISTRY[execute_mode]


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Add `Dispatch.<NAME>` with its two functions."""
    mode = Dispatch.register(dispatch_mode_name)
    DISPATCH_MODE_FN_REGISTRY[mode] = _functions(dispatch_fn, collect_fn)


def update_dispatch_mode(
    dispatch_mode: Dispatch, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Replace the functions of a mode, for groups that are created from now on."""
    _check_dispatch_mode(dispatch_mode)
    if dispatch_mode not in DISPATCH_MODE_FN_REGISTRY:
        raise ValueError(f"{dispatch_mode!r} has no functions to replace")
    DISPATCH_MODE_FN_REGISTRY[dispatch_mode] = _functions(dispatch_fn, collect_fn)


def mode_functions(dispatch_mode: Dispatch | ModeFunctions) -> ModeFunctions:
    """The functions of a registered mode, or those that the user wrote into `register`."""
    if isinstance(dispatch_mode, dict):
        return dispatch_mode
    return get_predefined_dispatch_fn(dispatch_mode)


def _check_dispatch_mode(dispatch_mode: Dispatch | ModeFunctions) -> None:
    if isinstance(dispatch_mode, Dispatch):
        return
    if not isinstance(dispatch_mode, dict):
        raise ValueError(
            f"dispatch_mode must be a Dispatch or a dict with dispatch_fn and collect_fn, "
            f"got {dispatch_mode!r}"
        )
    missing = {"dispatch_fn", "collect_fn"} - dispatch_mode.keys()
    if missing:
        raise ValueError(f"dispatch_mode {dispatch_mode!r} lacks {sorted(missing)}")


def _check_execute_mode(execute_mode: Execute) -> None:
    if execute_mode not in EXECUTE_MODE_FN_REGISTRY:
        known = ", ".join(repr(mode) for mode in EXECUTE_MODE_FN_REGISTRY)
        raise ValueError(f"execute_mode is {execute_mode!r}; it must be one of: {known}")
