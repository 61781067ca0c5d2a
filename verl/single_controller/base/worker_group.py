"""`WorkerGroup`: many ranks that the driver calls like one object.

For each method that the worker class registered, the group has a method of the same name:

    dispatch (split the arguments) -> execute (on the ranks) -> wait -> collect (join the results)

All of this is the same for every back-end; a `Backend` only starts, calls and stops ranks. A group
is cheap: `spawn`, `fuse` and `with_deadline` give views that share the back-end and differ in which
methods they show and how long they wait.

`bind_method` reads the note that `register` left and puts together the functions of a method;
`group_method` runs them in order. Where the only rank is this process, execute is a plain call of
the worker's method: two frames lie between the caller and the method. Rows that dispatch added to
make a batch divisible are dropped again, so neither workers nor users see that count.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tensordict import TensorDictBase

from verl.protocol import DataProto, DataProtoFuture
from verl.protocol.transport import concat_parts
from verl.single_controller.base.backend import (
    DEFAULT_CALL_TIMEOUT_SECONDS,
    Backend,
    Call,
    RankCall,
    RankCheck,
    wait_for_results,
    watch_ranks,
)
from verl.single_controller.base.colocation import (
    FUSED_ENTRY,
    FUSED_SEPARATOR,
    ClassWithInitArgs,
    ColocatedWorker,
)
from verl.single_controller.base.decorator import (
    get_predefined_execute_fn,
    mode_functions,
    registered_methods,
)
from verl.single_controller.base.dispatch import (
    PADDING_KEY,
    Arguments,
    Dispatch,
    Execute,
    collect_all_to_all,
    collect_dp_compute,
    dispatch_all_to_all,
    is_reference,
    map_arguments,
    narrow,
)
from verl.single_controller.base.futures import GroupFuture, expand_futures
from verl.single_controller.base.resource_pool import ResourcePool
from verl.utils import tensordict_utils

logger = logging.getLogger(__name__)

__all__ = ["ClassWithInitArgs", "ResourcePool", "WorkerGroup"]

Group = TypeVar("Group", bound="WorkerGroup")


Function = Callable[..., Any]


class WorkerGroup:
    """Back-ends subclass this only to construct it."""

    def __init__(
        self,
        resource_pool: ResourcePool | None,
        *,
        backend: Backend,
        worker_class: type | None,
        name: str,
        call_timeout_seconds: float = DEFAULT_CALL_TIMEOUT_SECONDS,
    ) -> None:
        if call_timeout_seconds <= 0:
            raise ValueError(f"call_timeout_seconds is {call_timeout_seconds}; it must be positive")
        self.resource_pool = resource_pool
        self.name = name
        self._backend = backend
        self._worker_class = worker_class
        self._call_timeout_seconds = call_timeout_seconds
        self._role = ""
        self._resolving: set[str] = set()  # methods that take futures as their values
        self._offered: set[str] = set()  # attributes that come from the worker class
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}
        if worker_class is not None:
            self._bind_worker_method(worker_class)
        kind = "attached" if worker_class is None else worker_class.__name__
        logger.info("worker group %s: %d ranks started (%s)", name, self.world_size, kind)

    @property
    def world_size(self) -> int:
        return self._backend.world_size

    @property
    def workers(self) -> list[Any]:
        """One handle per rank; what it is depends on the back-end."""
        return self._backend.workers

    @property
    def call_timeout_seconds(self) -> float:
        """How long a call of this group may take."""
        return self._call_timeout_seconds

    @property
    def reference_type(self) -> type:
        """What a non-blocking call gives for each rank."""
        return self._backend.reference_type

    # ---- calling ---------------------------------------------------------------------------------

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        call = self.start_call(method_name)
        return self.resolve(self.execute_all_async(method_name, *args, **kwargs), call)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Start the method on all ranks; one reference per rank.

        When every argument is a list with one entry per rank, each rank gets its entry; otherwise
        all ranks get all arguments.
        """
        return self._submit(method_name, self._rank_calls(args, kwargs))

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        call = self.start_call(method_name)
        return self.resolve(self.execute_rank_zero_async(method_name, *args, **kwargs), call)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return self._submit(method_name, [RankCall(0, args, kwargs)])[0]

    def execute_ranks(
        self, ranks: Sequence[int], method_name: str, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Run a method on some of the ranks with the same arguments; their results, in order."""
        return self.execute_rank_calls(
            method_name, [RankCall(rank, args, kwargs) for rank in ranks]
        )

    def execute_rank_calls(self, method_name: str, rank_calls: Sequence[RankCall]) -> list[Any]:
        """Run a method on some of the ranks, each with its own arguments; results in order."""
        call = self.start_call(method_name)
        references = self._submit(method_name, rank_calls)
        return wait_for_results(
            self._backend, call, [rank_call.rank for rank_call in rank_calls], references
        )

    def start_call(self, method_name: str) -> Call:
        """The clock of a call starts now."""
        return Call(self.name, method_name, self._call_timeout_seconds)

    def resolve(self, references: Any, call: Call | None = None) -> Any:
        """The value of rank zero's reference, or the values of a list with one per rank.

        Waits until the deadline of `call`; without one, for this group's time from now on.
        """
        call = call or self.start_call("an earlier call")
        if isinstance(references, list):
            return wait_for_results(self._backend, call, range(len(references)), references)
        return wait_for_results(self._backend, call, [0], [references])[0]

    def with_deadline(self: Group, seconds: float) -> Group:
        """The same group with another deadline: `group.with_deadline(60).update(batch)`."""
        if seconds <= 0:
            raise ValueError(f"a deadline of {seconds} s cannot be met; it must be positive")
        view = self._view(_call_timeout_seconds=seconds)
        view._bind_role(view._role)
        for name in self._offered:
            role = vars(self)[name]
            if isinstance(role, WorkerGroup):  # a fused role
                view._offer(name, role.with_deadline(seconds), f"role {name!r}")
        return view

    def _submit(self, method_name: str, rank_calls: Sequence[RankCall]) -> list[Any]:
        call = self.start_call(method_name)
        if method_name in self._resolving:
            rank_calls = [
                RankCall(rank, *expand_futures(args, kwargs)) for rank, args, kwargs in rank_calls
            ]
        if self._role and self._colocated_class().is_fused:
            address = f"{self._role}{FUSED_SEPARATOR}{method_name}"
            rank_calls = [
                RankCall(rank, (address, *args), kwargs) for rank, args, kwargs in rank_calls
            ]
            return self._backend.submit(call, FUSED_ENTRY, rank_calls)
        remote_name = f"{self._role}_{method_name}" if self._role else method_name
        return self._backend.submit(call, remote_name, rank_calls)

    def _rank_calls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[RankCall]:
        """The arguments of each rank: its entries of lists with one per rank, or all of them."""
        ranks = range(self.world_size)
        values = (*args, *kwargs.values())
        if not all(isinstance(value, list) and len(value) == len(ranks) for value in values):
            return [RankCall(rank, args, kwargs) for rank in ranks]
        rank_args = list(zip(*args, strict=True)) if args else [()] * len(ranks)
        return [
            RankCall(rank, rank_args[rank], {key: value[rank] for key, value in kwargs.items()})
            for rank in ranks
        ]

    def _holds_references(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether something that stands for its value is among the arguments or their entries."""
        return any(
            is_reference(entry) or isinstance(entry, self.reference_type)
            for value in (*args, *kwargs.values())
            for entry in (value if isinstance(value, list) else [value])
        )

    # ---- methods of the worker class -------------------------------------------------------------

    def _bind_worker_method(
        self, user_defined_cls: type, func_generator: Function | None = None
    ) -> list[str]:
        """Give this group a method for each one that the class registered; their names."""
        notes = registered_methods(user_defined_cls)
        self._resolving = {
            name for name, note in notes.items() if "materialize_futures" not in note
        }
        for method_name, note in notes.items():
            member = bind_method(self, method_name, note, func_generator or group_method)
            self._offer(method_name, member, f"method {user_defined_cls.__name__}.{method_name}")
        return list(notes)

    def _offer(self, name: str, member: Any, what: str) -> None:
        """Make a method or a role an attribute of this group, if the name is free."""
        is_member = name in vars(self) or any(name in vars(cls) for cls in type(self).__mro__)
        if is_member and name not in self._offered:
            raise ValueError(f"{what} has the name of a worker group's own member; rename it")
        self._offered.add(name)
        setattr(self, name, member)

    def spawn(self: Group, prefix_set: Iterable[str]) -> dict[str, Group]:
        """A group per role of a colocated class; its methods have the names of the role's class."""
        return {role: self._view_of(role) for role in prefix_set}

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make each role of a fused class an attribute: `group.actor.update(batch)`."""
        for role, group in self.spawn(prefix_set).items():
            self._offer(role, group, f"role {role!r}")

    def _view_of(self: Group, role: str) -> Group:
        roles = self._roles()
        if role not in roles:
            raise ValueError(
                f"worker group {self.name!r} has no role {role!r}; known: {sorted(roles) or 'none'}"
            )
        view = self._view(name=role, _role=role, _dispatch_info={}, _collect_info={})
        view._bind_role(role)
        return view

    def _view(self: Group, **changes: Any) -> Group:
        """Another group on the same ranks, without the attributes that come from the class."""
        view = copy.copy(self)
        for name in self._offered:
            delattr(view, name)
        vars(view).update(_offered=set(), **changes)
        return view

    def _bind_role(self, role: str) -> None:
        if role:
            self._bind_worker_method(self._roles()[role].worker_class)
        elif self._worker_class is not None:
            self._bind_worker_method(self._worker_class)

    def _roles(self) -> dict[str, ClassWithInitArgs]:
        return self._colocated_class().roles

    def _colocated_class(self) -> type[ColocatedWorker]:
        """The class itself if it holds roles, else the one that holds none."""
        if self._worker_class is not None and issubclass(self._worker_class, ColocatedWorker):
            return self._worker_class
        return ColocatedWorker

    # ---- what dispatch functions ask -------------------------------------------------------------

    def put_once(self, parts: list[Any]) -> list[Any]:
        """Make each part cheap to give to several ranks."""
        return self._backend.share(parts)

    def future_of(self, references: list[Any], positions: list[int]) -> GroupFuture:
        """The batch whose parts are at `positions` of `references`, which has one per rank."""
        return GroupFuture(
            collect_fn=concat_parts,
            futures=[references[position] for position in positions],
            references=references,
            positions=positions,
            resolve=self.resolve,
        )

    def mesh_dp_ranks(self, mesh_name: str) -> list[int]:
        """For each rank its data-parallel rank in a mesh; the workers are asked once."""
        if mesh_name not in self._dispatch_info:
            self._dispatch_info[mesh_name] = self.execute_all_sync(
                "_query_dispatch_info", mesh_name
            )
        return self._dispatch_info[mesh_name]

    def mesh_collect_mask(self, mesh_name: str) -> list[bool]:
        """For each rank whether its result counts in a mesh; the workers are asked once."""
        if mesh_name not in self._collect_info:
            self._collect_info[mesh_name] = self.execute_all_sync("_query_collect_info", mesh_name)
        return self._collect_info[mesh_name]

    # ---- life and death --------------------------------------------------------------------------

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Look after the ranks between calls: a death is logged as soon as it is seen.

        The next call raises `WorkerDied`, with or without this check; the driver is never killed.
        """
        watch_ranks(self._backend, self.name, every_n_seconds)

    def rank_check(self, method: str, timeout_seconds: float) -> RankCheck:
        """To call now and then while what `method` has begun on the ranks goes on there: raises
        `WorkerDied` or `WorkerTimeout` if a rank has ended or is stopped."""
        return RankCheck(self._backend, self.name, method, timeout_seconds)

    def shutdown(self) -> None:
        """End the ranks of this group and of all its views. Bounded; may be called again."""
        self._backend.shutdown()


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
        if is_direct and not group._holds_references(args, kwargs):
            function = backend.method_here(group._role, method_name)
            rank_call = (
                group._rank_calls(args, kwargs)[0] if is_for_all else RankCall(0, args, kwargs)
            )
            reference = backend.run_here(started, function, rank_call)
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
    """Rank zero's part of arguments that are split over all ranks."""

    def dispatch(group: "WorkerGroup", *args: Any, **kwargs: Any) -> Arguments:
        args, kwargs = dispatch_fn(group, *args, **kwargs)
        kwargs.pop(PADDING_KEY, 0)
        return map_arguments(lambda parts: parts[0], args, kwargs)

    return dispatch


def _narrowed(dispatch_fn: Function, columns: Sequence[str]) -> Function:
    """Only the columns that the method reads travel."""

    def dispatch(group: "WorkerGroup", *args: Any, **kwargs: Any) -> Arguments:
        args, kwargs = map_arguments(partial(narrow, columns=columns), args, kwargs)
        return dispatch_fn(group, *args, **kwargs)

    return dispatch


def without_padding(output: Any, padding: int) -> Any:
    """Drop the last `padding` rows, which dispatch had added; of a future, once it is resolved."""
    if isinstance(output, DataProtoFuture):
        return replace(output, dispatch_fn=partial(without_padding, padding=padding))
    if isinstance(output, TensorDictBase):
        return tensordict_utils.unpad(output, padding)
    return output[:-padding] if isinstance(output, (DataProto, list)) else output
