"""The tensors in a file that `torch.save` wrote, without unpickling it.

A file is a zip archive: `data.pkl` says which tensors there are and `data/KEY` holds the bytes of
each storage. The pickle is read as a description, and of the descriptions only tensors, parameters
and DTensors are understood. Bytes are read when a tensor is asked for.

A pickle is a program for a small machine with a stack. We run that program with a machine whose
every instruction only builds plain data: a name becomes a `Symbol`, a call becomes a `Record` of
what would have been called. Nothing is imported and nothing is called, so there is nothing to allow
or forbid: a hostile pickle yields records that no reader looks for. Time and memory are in
proportion to the size of the pickle.
"""

import pickletools
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}  # fmt: skip


REBUILDS_TENSOR = "_rebuild_tensor_v2"
MAX_PICKLE_BYTES = 256 << 20


class UnreadablePickleError(ValueError):
    """Not a pickle, or one with instructions that no file of tensors has."""


@dataclass(frozen=True)
class Slice:
    """An archive inside of a file."""

    path: Path
    offset: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.path.name} at {self.offset}"


def opened(archive: Path | Slice) -> zipfile.ZipFile:
    if isinstance(archive, Path):
        return zipfile.ZipFile(archive)
    with archive.path.open("rb") as stream:
        stream.seek(archive.offset)
        return zipfile.ZipFile(BytesIO(stream.read(archive.length)))


@dataclass(frozen=True)
class TorchTensor:
    """A tensor in an archive, not yet read."""

    archive: "Path | Slice"
    storage: str
    dtype: torch.dtype
    num_stored: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self) -> Tensor:
        last = self.offset + sum(
            (n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)
        )
        if prod(self.shape) and not (0 <= self.offset <= last < self.num_stored):
            raise UnreadablePickleError(f"a tensor of {self.archive.name} lies beyond its storage")
        if not prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        with opened(self.archive) as archive:
            octets = bytearray(_entry(archive, f"data/{self.storage}", self._num_bytes))
        stored = torch.frombuffer(octets, dtype=self.dtype)
        return stored.as_strided(self.shape, self.stride, self.offset).contiguous()

    @property
    def _num_bytes(self) -> int:
        return self.num_stored * self.dtype.itemsize


@dataclass(frozen=True)
class TorchShard:
    """One rank's part of a DTensor."""

    local: TorchTensor
    shape: tuple[int, ...]
    sharded_dim: int | None
    """The dimension that is sharded; None where every rank holds the whole tensor."""

    index: int
    """Index of this shard along that dimension."""

    is_first_copy: bool
    """False on ranks that repeat what others hold."""


def read_torch_file(path: Path, *, rank: int) -> dict[str, TorchTensor | TorchShard]:
    """The tensors of a saved state by name; what is not a tensor is left out."""
    try:
        with zipfile.ZipFile(path) as archive:
            tree = read_pickle(_entry(archive, "data.pkl"))
    except (zipfile.BadZipFile, UnreadablePickleError) as error:
        raise ValueError(
            f"{path} is not a file of tensors that torch.save wrote: {error}"
        ) from error
    described = {name: _described(path, value, rank) for name, value in _mapping(tree).items()}
    return {name: tensor for name, tensor in described.items() if tensor is not None}


def read_torch_tensor(archive: Slice) -> Tensor:
    """The only tensor of an archive."""
    try:
        with opened(archive) as entries:
            described = _described(archive, read_pickle(_entry(entries, "data.pkl")), rank=0)
        if isinstance(described, TorchTensor):
            return described.read()
    except (zipfile.BadZipFile, UnreadablePickleError) as error:
        raise ValueError(
            f"{archive.name} is not a tensor that torch.save wrote: {error}"
        ) from error
    raise ValueError(f"{archive.name} is not a tensor")


def _entry(archive: zipfile.ZipFile, name: str, num_bytes: int | None = None) -> bytes:
    """The bytes of an entry, whatever the archive calls its top folder; never a compressed one."""
    found = [info for info in archive.infolist() if info.filename.partition("/")[2] == name]
    if len(found) != 1:
        raise UnreadablePickleError(f"it has {len(found)} entries {name}")
    info = found[0]
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise UnreadablePickleError(f"{name} is compressed, which torch.save does not do")
    if info.file_size > MAX_PICKLE_BYTES if num_bytes is None else info.file_size != num_bytes:
        raise UnreadablePickleError(f"{name} has {info.file_size} bytes")
    return archive.read(info)


def _mapping(value: Any) -> Mapping[str, Any]:
    items = value.items if isinstance(value, Record) else value
    is_ordered = not isinstance(value, Record) or value.is_made_by("OrderedDict")
    if type(items) is not dict or not is_ordered or any(type(key) is not str for key in items):
        raise ValueError("the file does not hold tensors by name")
    return items


def _described(path: Path | Slice, value: Any, rank: int) -> TorchTensor | TorchShard | None:
    if not isinstance(value, Record):
        return None
    if value.is_made_by("_rebuild_parameter", "_rebuild_parameter_with_state"):
        value = _argument(value, 0)
        if not isinstance(value, Record):
            return None
    if value.is_made_by(REBUILDS_TENSOR):
        return _tensor(path, value)
    if value.is_made_by("_rebuild_from_type_v2"):
        return _shard(path, value, rank)
    return None


def _tensor(path: Path | Slice, record: Any) -> TorchTensor:
    if not isinstance(record, Record) or not record.is_made_by(REBUILDS_TENSOR):
        raise ValueError(f"{path} holds a part of a tensor that is not a plain tensor")
    storage, offset, shape, stride = (_argument(record, index) for index in range(4))
    identity = storage.identity if isinstance(storage, Persistent) else ()
    match identity:
        case ("storage", Symbol(name=kind), str(key), _, int(num_stored)) if kind in DTYPES:
            return TorchTensor(
                archive=path,
                storage=key,
                dtype=DTYPES[kind],
                num_stored=num_stored,
                offset=_extents((offset,))[0],
                shape=_extents(shape),
                stride=_extents(stride),
            )
    raise ValueError(f"{path} holds a tensor of a kind that is not known: {type(storage).__name__}")


@dataclass
class Record:
    """An object that somebody else would have made by calling `maker(*arguments)`."""

    maker: Any
    arguments: Any
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)

    def is_made_by(self, *names: str) -> bool:
        return isinstance(self.maker, Symbol) and self.maker.name in names


def _shard(path: Path | Slice, record: Record, rank: int) -> TorchShard:
    state = _dict_with(_argument(record, 3), "_local_tensor", "_spec")
    spec = _dict_with(state["_spec"], "placements", "tensor_meta", "mesh")
    shape = _size(_argument(spec["tensor_meta"], 0))
    mesh = _dict_with(spec["mesh"])
    placements = list(spec["placements"])
    where = mesh.get("_coordinate_on_dim") or ([rank] if len(placements) == 1 else None)
    if where is None or len(where) != len(placements):
        raise ValueError(f"{path} does not state its coordinate in the mesh")
    sharded: list[tuple[int, int]] = []
    is_first_copy = True
    for placement, index in zip(placements, _extents(tuple(where)), strict=True):
        if isinstance(placement, Record) and placement.is_made_by("Shard"):
            sharded.append((_shard_dim(placement), index))
        elif isinstance(placement, Record) and placement.is_made_by("Replicate"):
            is_first_copy = is_first_copy and index == 0
        else:
            raise ValueError(f"{path} shards a tensor in an unknown way")
    if len(sharded) > 1:
        raise ValueError(f"{path} shards a tensor twice; merge it where it was saved")
    dim, index = sharded[0] if sharded else (None, 0)
    return TorchShard(
        local=_tensor(path, state["_local_tensor"]),
        shape=shape,
        sharded_dim=dim,
        index=index,
        is_first_copy=is_first_copy,
    )


def _shard_dim(placement: Record) -> int:
    """In the state of the object, or in the call that makes it."""
    state = placement.state
    dim = state["dim"] if isinstance(state, dict) and "dim" in state else _argument(placement, 0)
    return _extents((dim,))[0]


def _argument(record: Any, index: int) -> Any:
    arguments = record.arguments if isinstance(record, Record) else None
    if type(arguments) is not tuple or len(arguments) <= index:
        raise ValueError("a tensor is described with too few arguments")
    return arguments[index]


def _dict_with(value: Any, *keys: str) -> dict[str, Any]:
    """The dictionary with these keys among an object's state and its slots."""
    state = value.state if isinstance(value, Record) else value
    for candidate in state if type(state) is tuple else (state,):
        if type(candidate) is dict and all(key in candidate for key in keys):
            return candidate
    raise ValueError(f"a sharded tensor is described without {', '.join(keys) or 'its mesh'}")


def _size(value: Any) -> tuple[int, ...]:
    is_size = isinstance(value, Record) and value.is_made_by("Size")
    return _extents(_argument(value, 0) if is_size else value)


def _extents(value: Any) -> tuple[int, ...]:
    is_plain = type(value) in (tuple, list)
    if not is_plain or any(type(n) is not int or not 0 <= n < 2**48 for n in value):
        raise ValueError("a tensor is described with extents that are not whole numbers")
    return tuple(value)


PLAIN_KEYS = (str, int, bool, float, bytes, type(None))


@dataclass(frozen=True)
class Symbol:
    """A class or function by its name; never looked up."""

    module: str
    name: str


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


@dataclass(frozen=True, eq=False)
class ObjectKey:
    """A key that is not plain; hashing one of nested tuples could take for ever."""

    key: Any


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
        index = len(self.stack) - 1
        while type(self.stack[index]) is not _Mark:
            index -= 1
            if index < 0:
                raise UnreadablePickleError("a group of values has no beginning")
        values = self.stack[index + 1 :]
        del self.stack[index:]
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
            items[key if type(key) in PLAIN_KEYS else ObjectKey(key)] = value

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
