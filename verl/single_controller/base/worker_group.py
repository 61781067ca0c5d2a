"""`WorkerGroup`: many ranks that the driver calls like one object.

For each method that the worker class registered, the group has a method of the same name:

    dispatch (split the arguments) -> execute (on the ranks) -> wait -> collect (join the results)

All of this is the same for every back-end; a `Backend` only starts, calls and stops ranks. A group
is cheap: `spawn`, `fuse` and `with_deadline` give views that share the back-end and differ in which
methods they show and how long they wait.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from verl.protocol.transport import DataProtoFuture, concat_parts
from verl.single_controller.base.answers import wait_for_answers
from verl.single_controller.base.backend import (
    DEFAULT_CALL_TIMEOUT_SECONDS,
    Backend,
    Call,
    Share,
)
from verl.single_controller.base.colocation import (
    FUSED_ENTRY,
    FUSED_SEPARATOR,
    ClassWithInitArgs,
    ColocatedWorker,
)
from verl.single_controller.base.decorator import registered_methods
from verl.single_controller.base.futures import GroupFuture, lay_out
from verl.single_controller.base.group_method import bind_method, group_method
from verl.single_controller.base.resource_pool import ResourcePool
from verl.single_controller.base.watch import watch_ranks

__all__ = ["ClassWithInitArgs", "ResourcePool", "WorkerGroup"]

Group = TypeVar("Group", bound="WorkerGroup")


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
        return self._submit(method_name, self._shares(args, kwargs))

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        call = self.start_call(method_name)
        return self.resolve(self.execute_rank_zero_async(method_name, *args, **kwargs), call)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return self._submit(method_name, [Share(0, args, kwargs)])[0]

    def execute_ranks(
        self, ranks: Sequence[int], method_name: str, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Run a method on some of the ranks with the same arguments; their answers, in order."""
        return self.execute_shares(method_name, [Share(rank, args, kwargs) for rank in ranks])

    def execute_shares(self, method_name: str, shares: Sequence[Share]) -> list[Any]:
        """Run a method on some of the ranks, each with its own arguments; answers in order."""
        call = self.start_call(method_name)
        references = self._submit(method_name, shares)
        return wait_for_answers(self._backend, call, [share.rank for share in shares], references)

    def start_call(self, method_name: str) -> Call:
        """The clock of a call starts now."""
        return Call(self.name, method_name, self._call_timeout_seconds)

    def resolve(self, references: Any, call: Call | None = None) -> Any:
        """The value of rank zero's reference, or the values of a list with one per rank.

        Waits until the deadline of `call`; without one, for this group's time from now on.
        """
        call = call or self.start_call("an earlier call")
        if isinstance(references, list):
            return wait_for_answers(self._backend, call, range(len(references)), references)
        return wait_for_answers(self._backend, call, [0], [references])[0]

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

    def _submit(self, method_name: str, shares: Sequence[Share]) -> list[Any]:
        call = self.start_call(method_name)
        if method_name in self._resolving:
            shares = [Share(rank, *lay_out(args, kwargs)) for rank, args, kwargs in shares]
        if self._role and self._is_fused():
            address = f"{self._role}{FUSED_SEPARATOR}{method_name}"
            shares = [Share(rank, (address, *args), kwargs) for rank, args, kwargs in shares]
            return self._backend.submit(call, FUSED_ENTRY, shares)
        remote_name = f"{self._role}_{method_name}" if self._role else method_name
        return self._backend.submit(call, remote_name, shares)

    def _shares(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Share]:
        """The arguments of each rank: its entries of lists with one per rank, or all of them."""
        ranks = range(self.world_size)
        values = (*args, *kwargs.values())
        if not all(isinstance(value, list) and len(value) == len(ranks) for value in values):
            return [Share(rank, args, kwargs) for rank in ranks]
        rank_args = list(zip(*args, strict=True)) if args else [()] * len(ranks)
        return [
            Share(rank, rank_args[rank], {key: value[rank] for key, value in kwargs.items()})
            for rank in ranks
        ]

    def _holds_futures(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether results that may not be there yet are among the arguments or their entries."""
        kinds = (DataProtoFuture, self.reference_type)
        return any(
            isinstance(entry, kinds)
            for value in (*args, *kwargs.values())
            for entry in (value if isinstance(value, list) else [value])
        )

    # ---- methods of the worker class -------------------------------------------------------------

    def _bind_worker_method(
        self, user_defined_cls: type, func_generator: Callable[..., Any] = group_method
    ) -> list[str]:
        """Give this group a method for each one that the class registered; their names."""
        notes = registered_methods(user_defined_cls)
        self._resolving = {
            name for name, note in notes.items() if "materialize_futures" not in note
        }
        for method_name, note in notes.items():
            member = bind_method(self, method_name, note, func_generator)
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

    def _is_fused(self) -> bool:
        return self._colocated_class().is_fused

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

    def shutdown(self) -> None:
        """End the ranks of this group and of all its views. Bounded; may be called again."""
        self._backend.shutdown()
