"""Several roles in one process per rank, so that they share its device.

`colocated_class` makes one worker class out of many. Each role's registered methods appear on it as
`<role>_<method>`; `WorkerGroup.spawn` gives a group per role that calls them by their own names. A
fused class has a single entry, `_fuw_execute`, for all methods of all roles; `WorkerGroup.fuse`
makes the roles attributes of the group. Either way the roles of one process see each other in
`fused_worker_dict`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from verl.single_controller.base.decorator import registered_methods
from verl.single_controller.base.dispatch import MAGIC_ATTR
from verl.single_controller.base.worker import Worker
from verl.utils.environment import temp_env_var

FUSED_ENTRY = "_fuw_execute"
FUSED_SEPARATOR = "_fwmn_"


class ClassWithInitArgs:
    """A class and the arguments to construct it with, later and elsewhere."""

    fused_worker_used: bool = False

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)

    @property
    def worker_class(self) -> type:
        """The plain Python class."""
        return self.cls

    @property
    def modules(self) -> list[str]:
        """Importable modules that a process needs to construct it."""
        module = self.worker_class.__module__
        return [] if module == "__main__" else [module]


class ColocatedWorker(Worker):
    """The roles of one rank; subclasses are made by `colocated_class` and `fused_class`."""

    roles: ClassVar[dict[str, ClassWithInitArgs]] = {}
    is_fused: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        with temp_env_var("DISABLE_WORKER_INIT", "1"):
            self.worker_dict = {role: spec() for role, spec in self.roles.items()}
        self.fused_worker_dict = self.worker_dict
        for role, worker in self.worker_dict.items():
            worker.fused_worker_dict = self.worker_dict
            if self.is_fused:
                vars(self)[role] = worker


def colocated_class(class_dict: Mapping[str, ClassWithInitArgs]) -> type[ColocatedWorker]:
    methods = {
        f"{role}_{name}": _forward_to(role, name, spec.worker_class)
        for role, spec in class_dict.items()
        for name in registered_methods(spec.worker_class)
    }
    return type("WorkerDict", (ColocatedWorker,), {"roles": _plain_roles(class_dict), **methods})


def fused_class(class_dict: Mapping[str, ClassWithInitArgs]) -> type[ColocatedWorker]:
    is_async = any(
        inspect.iscoroutinefunction(vars_of(spec.worker_class, name))
        for spec in class_dict.values()
        for name in registered_methods(spec.worker_class)
    )
    entry = _execute_fused_async if is_async else _execute_fused
    members = {"roles": _plain_roles(class_dict), "is_fused": True, FUSED_ENTRY: entry}
    return type(f"FusedWorker_{'_'.join(class_dict)}", (ColocatedWorker,), members)


def _plain_roles(class_dict: Mapping[str, ClassWithInitArgs]) -> dict[str, ClassWithInitArgs]:
    """The roles without what a back-end added to their classes."""
    if not class_dict:
        raise ValueError("there is nothing to put into one process: class_dict is empty")
    return {
        role: ClassWithInitArgs(spec.worker_class, *spec.args, **spec.kwargs)
        for role, spec in class_dict.items()
    }


def _forward_to(role: str, name: str, worker_class: type) -> Callable[..., Any]:
    original = vars_of(worker_class, name)

    def call(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker_dict[role], name)(*args, **kwargs)

    async def call_async(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.worker_dict[role], name)(*args, **kwargs)

    forward = call_async if inspect.iscoroutinefunction(original) else call
    forward.__name__ = f"{role}_{name}"
    setattr(forward, MAGIC_ATTR, registered_methods(worker_class)[name])
    return forward


def vars_of(worker_class: type, name: str) -> Any:
    return inspect.getattr_static(worker_class, name)


def _fused_method(worker: ColocatedWorker, address: str) -> Callable[..., Any]:
    role, _, name = address.partition(FUSED_SEPARATOR)
    return getattr(worker.worker_dict[role], name)


def _execute_fused(self: ColocatedWorker, address: str, *args: Any, **kwargs: Any) -> Any:
    return _fused_method(self, address)(*args, **kwargs)


async def _execute_fused_async(
    self: ColocatedWorker, address: str, *args: Any, **kwargs: Any
) -> Any:
    result = _fused_method(self, address)(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result
