"""Pickles read as descriptions: nothing they name is imported, nothing they ask for is called.

A pickle is a program for a small machine with a stack. We run that program with a machine whose
every instruction only builds plain data: a name becomes a `Symbol`, a call becomes a `Record` of
what would have been called. So there is nothing to allow or forbid: a hostile pickle yields records
that no reader looks for. Time and memory are in proportion to the size of the pickle.
"""

import pickletools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_PICKLE_BYTES = 256 << 20
PLAIN_KEYS = (str, int, bool, float, bytes, type(None))


class UnreadablePickleError(ValueError):
    """Not a pickle, or one with instructions that no file of tensors has."""


@dataclass(frozen=True)
class Symbol:
    """A class or function by its name; never looked up."""

    module: str
    name: str


@dataclass
class Record:
    """An object that somebody else would have made by calling `maker(*arguments)`."""

    maker: Any
    arguments: Any
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)

    def is_made_by(self, *names: str) -> bool:
        return isinstance(self.maker, Symbol) and self.maker.name in names


@dataclass(frozen=True)
class Persistent:
    """Something kept outside the pickle, by its identity there."""

    identity: Any


def read_pickle(octets: bytes) -> Any:
    """What the pickle describes."""
    if len(octets) > MAX_PICKLE_BYTES:
        raise UnreadablePickleError(
            f"it has {len(octets)} bytes; the structure of a checkpoint has at most "
            f"{MAX_PICKLE_BYTES}"
        )
    machine = _Machine()
    try:
        with warnings.catch_warnings():
            # Text of the oldest kind of pickle is read like Python source, which warns of odd
            # escapes.
            warnings.simplefilter("ignore", DeprecationWarning)
            for opcode, argument, _ in pickletools.genops(octets):
                if opcode.name == "STOP":
                    return machine.stack.pop()
                machine.do(opcode.name, argument)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        if isinstance(error, UnreadablePickleError):
            raise
        raise UnreadablePickleError(f"not a pickle: {error}") from error
    raise UnreadablePickleError("it ends before its last instruction")


class _Mark:
    """Where a group of values on the stack begins."""


class _Opaque:
    """Stands for a key that is not plain; hashing one of nested tuples could take for ever."""


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        if name in IGNORED:
            return
        if name in PUSHES_ARGUMENT:
            self.stack.append(argument)
        elif name in CONSTANTS:
            self.stack.append(CONSTANTS[name]())
        elif name in INSTRUCTIONS:
            INSTRUCTIONS[name](self, argument)
        else:
            raise UnreadablePickleError(f"it has the instruction {name}")

    def since_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while type(self.stack[place]) is not _Mark:
            place -= 1
            if place < 0:
                raise UnreadablePickleError("a group of values has no beginning")
        values = self.stack[place + 1 :]
        del self.stack[place:]
        return values

    def last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise UnreadablePickleError("it takes more from the stack than it put there")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        items = target.items if isinstance(target, Record) else target
        if type(items) is not dict or len(pairs) % 2:
            raise UnreadablePickleError("it sets items of something that has none")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            items[key if type(key) in PLAIN_KEYS else _Opaque()] = value

    def append(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is list:
            self.stack[-1].extend(values)
        # A record that is a list or a set keeps nothing: no tensor is described that way.

    def call(self, maker: Any, arguments: Any) -> None:
        self.stack.append(Record(maker, arguments))

    def build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Record):
            raise UnreadablePickleError("it gives a state to something that is not an object")
        self.stack[-1].state = state


def _global(machine: _Machine, argument: str) -> None:
    module, _, name = argument.partition(" ")
    machine.stack.append(Symbol(module, name))


def _stack_global(machine: _Machine, argument: None) -> None:
    module, name = machine.last(2)
    if type(module) is not str or type(name) is not str:
        raise UnreadablePickleError("it names a global by something that is not text")
    machine.stack.append(Symbol(module, name))


def _memoize(machine: _Machine, argument: None) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _put(machine: _Machine, argument: int) -> None:
    machine.memo[argument] = machine.stack[-1]


def _get(machine: _Machine, argument: int) -> None:
    machine.stack.append(machine.memo[argument])


def _tuple_of(count: int) -> Callable[[_Machine, Any], object]:
    return lambda machine, argument: machine.stack.append(tuple(machine.last(count)))


IGNORED = {"PROTO", "FRAME"}
PUSHES_ARGUMENT = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": list,
    "MARK": _Mark,
}
INSTRUCTIONS: dict[str, Callable[[_Machine, Any], object]] = {
    "POP": lambda machine, argument: machine.last(1),
    "POP_MARK": lambda machine, argument: machine.since_mark(),
    "TUPLE": lambda machine, argument: machine.stack.append(tuple(machine.since_mark())),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "LIST": lambda machine, argument: machine.stack.append(machine.since_mark()),
    "FROZENSET": lambda machine, argument: machine.stack.append(machine.since_mark()),
    "APPEND": lambda machine, argument: machine.append(machine.last(1)),
    "APPENDS": lambda machine, argument: machine.append(machine.since_mark()),
    "ADDITEMS": lambda machine, argument: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, argument: machine.set_items(machine.last(2)),
    "SETITEMS": lambda machine, argument: machine.set_items(machine.since_mark()),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "MEMOIZE": _memoize,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "BINGET": _get,
    "LONG_BINGET": _get,
    "BINPERSID": lambda machine, argument: machine.stack.append(Persistent(*machine.last(1))),
    "REDUCE": lambda machine, argument: machine.call(*machine.last(2)),
    "NEWOBJ": lambda machine, argument: machine.call(*machine.last(2)),
    "NEWOBJ_EX": lambda machine, argument: machine.call(*machine.last(3)[:2]),
    "BUILD": lambda machine, argument: machine.build(),
}
