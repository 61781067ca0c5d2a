"""Helpers on plain Python: dictionaries, extensible enumerations, namespaces, time limits, text.

Nothing here imports torch. A thread cannot be stopped from outside, so `timeout_limit` runs the
call in a forked child (the default) or under a signal. The child starts in milliseconds and takes
any function; it sees the caller's state but cannot change it, its result must be picklable, and
neither CUDA nor torch's thread pools work in it. Graders have long-lived workers of their own.

`printable` makes text of a model or a dataset safe to show: terminal escapes, line breaks that
forge a log line and marks that reverse the writing direction appear as escapes (`\\x1b`, `\\n`).
"""

import functools
import multiprocessing
import os
import signal
import threading
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from types import FrameType, SimpleNamespace
from typing import Any, ParamSpec, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl.utils.environment import temp_env_var as temp_env_var
from verl.utils.processes import forks_end_here

Member = TypeVar("Member", bound="DynamicEnum")


def append_to_dict(data: dict[str, Any], new: Mapping[str, Any], prefix: str = "") -> None:
    """Collect the values of `new` in the lists of `data`; a list adds its items one by one.

    A key that does not start with `prefix` yet gets it, as in `rename_dict`.
    """
    for key, value in rename_dict(new, prefix).items():
        items = value if isinstance(value, list) else [value]
        data.setdefault(key, []).extend(items)


def rename_dict(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A copy whose keys all start with `prefix`; keys that do already keep their name."""
    return {key if key.startswith(prefix) else prefix + key: value for key, value in data.items()}


def union_two_dict(dict1: dict[Any, Any], dict2: Mapping[Any, Any]) -> dict[Any, Any]:
    """Add `dict2` to `dict1` in place and return it; a key in both must have equal values."""
    for key, value in dict2.items():
        if key in dict1 and not _are_equal(dict1[key], value):
            raise ValueError(
                f"cannot join two dictionaries that disagree on {key!r}: "
                f"{dict1[key]!r} and {value!r}; rename or drop one of them"
            )
    dict1.update(dict2)
    return dict1


def _are_equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    same = left == right
    return same if isinstance(same, bool) else bool(same.all())  # arrays compare item by item


def convert_to_regular_types(obj: Any) -> Any:
    """The same without OmegaConf: at any depth a `DictConfig` is a dict, a `ListConfig` a list."""
    if isinstance(obj, (DictConfig, ListConfig)):
        return OmegaConf.to_container(obj, resolve=True)
    if isinstance(obj, dict):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [convert_to_regular_types(item) for item in obj]
    return obj


class NestedNamespace(SimpleNamespace):
    """Attribute access to a nested dictionary: `NestedNamespace({"a": {"b": 1}}).a.b == 1`."""

    def __init__(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        entries = {**dictionary, **kwargs}
        odd = [key for key in entries if not isinstance(key, str)]
        if odd:
            raise TypeError(f"the keys of a NestedNamespace are strings; got {odd!r}")
        super().__init__(
            **{
                key: NestedNamespace(value) if isinstance(value, Mapping) else value
                for key, value in entries.items()
            }
        )


class DynamicEnumMeta(type):
    """Gives the class itself iteration, `in`, `len` and `[name]`."""

    _registry: "dict[str, DynamicEnum]"

    def __iter__(cls) -> "Iterator[DynamicEnum]":
        return iter(cls._registry.values())

    def __contains__(cls, item: object) -> bool:
        if isinstance(item, str):
            return item.upper() in cls._registry
        return item in cls._registry.values()

    def __getitem__(cls, name: str) -> "DynamicEnum":
        key = name.upper()
        if key not in cls._registry:
            raise KeyError(f"{cls.__name__} has no member {key}; known: {', '.join(cls.names())}")
        return cls._registry[key]

    def __len__(cls) -> int:
        return len(cls._registry)

    def names(cls) -> list[str]:
        return list(cls._registry)


class DynamicEnum(metaclass=DynamicEnumMeta):
    """An enumeration that grows at run time.

        class Dispatch(DynamicEnum): ...
        Dispatch.register("ONE_TO_ALL")     # now also Dispatch.ONE_TO_ALL

    Names are upper case however they are written. There is one object per member and process, so
    `is` works; a pickled member that the receiving process does not know is registered there.
    """

    _registry: "dict[str, DynamicEnum]" = {}
    _next_value: int = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._registry = {}
        cls._next_value = 0

    def __init__(self, name: str, value: int) -> None:
        self.name = name
        self.value = value

    @classmethod
    def register(cls: type[Member], name: str) -> Member:
        key = name.upper()
        if key in cls._registry:
            raise ValueError(f"{cls.__name__}.{key} is already registered")
        member = cls(key, cls._next_value)
        cls._registry[key] = member
        cls._next_value += 1
        setattr(cls, key, member)
        return member

    @classmethod
    def remove(cls: type[Member], name: str) -> Member:
        """Forget a member and return it; its value is not given out again."""
        member = cls[name]
        del cls._registry[member.name]
        delattr(cls, member.name)
        return member  # pyright: ignore[reportReturnType]

    @classmethod
    def from_name(cls: type[Member], name: str) -> Member | None:
        return cls._registry.get(name.upper())  # pyright: ignore[reportReturnType]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _known_or_registered, (type(self), self.name)


def _known_or_registered(enum: type[Member], name: str) -> Member:
    return enum.from_name(name) or enum.register(name)


P = ParamSpec("P")
R = TypeVar("R")

_EXIT_SECONDS = 1.0


def timeout_limit(
    seconds: float, use_signals: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a call take at most `seconds`, then raise `TimeoutError`.

    By default the call runs in a forked child, from any thread; at the limit the child and the
    processes it started are killed, whatever they were doing. With `use_signals` the call stays in
    this process and `SIGALRM` interrupts it: only in the main thread, and only between Python
    instructions, so one long call into C code delays it.
    """
    if seconds <= 0:
        raise ValueError(f"timeout_limit needs a positive number of seconds; got {seconds}")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def limited(*args: P.args, **kwargs: P.kwargs) -> R:
            call = functools.partial(function, *args, **kwargs)
            name = function.__qualname__
            if use_signals:
                with alarm(seconds, name):
                    return call()
            return call_in_child(call, seconds, name)

        return limited

    return decorate


@contextmanager
def alarm(seconds: float, name: str) -> Iterator[None]:
    """Raise `TimeoutError` after `seconds`; an alarm that was set before still rings on time."""
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            f"timeout_limit(use_signals=True) on {name} works only in the main thread; "
            "leave use_signals out to run the call in a child process"
        )

    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(_expired(name, seconds))

    outer_seconds, interval = signal.getitimer(signal.ITIMER_REAL)
    if 0 < outer_seconds <= seconds:  # somebody else's alarm rings first; leave it to them
        yield
        return
    start = time.monotonic()
    handler = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if outer_seconds:
            left = outer_seconds - (time.monotonic() - start)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-6), interval)


def call_in_child(call: Callable[[], R], seconds: float, name: str) -> R:
    """Run `call` in a fork of this process and hand back what it returned or raised."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(call, sender), name=f"timeout_limit:{name}")
    child.start()
    sender.close()  # the child's copy is now the only one, so its death ends the pipe
    try:
        if not receiver.poll(seconds):
            raise TimeoutError(_expired(name, seconds))
        succeeded, outcome = receiver.recv()
        error = None if succeeded else _received_error(receiver, name, outcome)
        child.join(_EXIT_SECONDS)  # lets it flush what it printed
    except EOFError:
        child.join(_EXIT_SECONDS)
        raise RuntimeError(
            f"the process running {name} died without an answer (exit code {child.exitcode})"
        ) from None
    finally:
        _kill_family(child)
        receiver.close()
    if error is not None:
        raise error from RuntimeError(outcome)
    return outcome


def _answer(call: Callable[[], Any], sender: Any) -> None:
    os.setsid()  # a group of its own, so that processes it starts die with it
    try:
        with forks_end_here():
            outcome = call()
        sender.send((True, outcome))
    except BaseException as error:
        sender.send((False, traceback.format_exc()))
        sender.send(error)
        raise SystemExit(1) from error


def _received_error(receiver: Any, name: str, text: str) -> BaseException:
    """The exception itself; one that does not survive the way is described instead."""
    try:
        return receiver.recv()
    except Exception as problem:
        raise RuntimeError(
            f"{name} raised something that cannot be sent between processes:\n{text}"
        ) from problem


def _kill_family(child: BaseProcess) -> None:
    assert child.pid is not None
    for kill in (os.killpg, os.kill):  # the group does not exist yet if the child just started
        with suppress(ProcessLookupError):
            kill(child.pid, signal.SIGKILL)
    child.join(_EXIT_SECONDS)
    child.close()


def _expired(name: str, seconds: float) -> str:
    return f"{name} took longer than allowed: timed out after {seconds} seconds"


# Control, format (direction marks, zero width), surrogate, private use, line and paragraph breaks.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
# Joins emoji and letters of several scripts into one; it neither moves nor hides text.
_HARMLESS = {"\u200d"}


def printable(text: object, *, max_characters: int | None = None) -> str:
    """`text` on one line without control characters, cut to `max_characters` with a mark."""
    shown = "".join(map(_shown, str(text)))
    if max_characters is not None and len(shown) > max_characters:
        return shown[:max_characters] + f"... ({len(shown) - max_characters} more)"
    return shown


def _shown(character: str) -> str:
    if character in _HARMLESS or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")
