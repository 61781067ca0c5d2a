"""Names that users may write in a config, and the objects they stand for.

One class serves every extension point: advantage estimators, policy losses, reward managers,
rollouts, agent loops, tools. A value may be the object itself or "module:attribute", which is
imported on first use so that optional dependencies stay optional.
"""

from collections.abc import Callable, Iterator, MutableMapping
from difflib import get_close_matches
from importlib import import_module
from typing import Generic, TypeVar

from verl.utils.environment import Misuse

T = TypeVar("T")
Entry = TypeVar("Entry")


class UnknownName(Misuse, ValueError, KeyError):
    """A name that a registry does not have: a user's mistake, and a missing key."""

    __str__ = Exception.__str__


class Registry(MutableMapping[str, T], Generic[T]):
    """Maps names to objects; an unknown name is refused with the closest one and the whole list.

    It is a dict as well: users' code assigns to it, updates and clears it. What is built in is
    known by the object: a table that was emptied and filled again is as before.
    """

    def __init__(self, kind: str, **entries: T | str) -> None:
        self.kind = kind
        self._entries: dict[str, T | str] = entries
        self._built_in: dict[str, object] = dict(entries)

    def register(self, name: str, *, built_in: bool = False) -> Callable[[Entry], Entry]:
        """Use as a decorator. A user's entry replaces a built-in of the same name (and keeps it
        when the built-in is loaded later); two users' entries of one name are an error."""

        def add(entry: Entry) -> Entry:
            holder = self._entries.get(name)
            is_users = holder is not None and holder is not self._built_in.get(name)
            if built_in:
                self._built_in[name] = entry
                if is_users:
                    return entry
            elif is_users and holder is not entry:
                raise ValueError(f"{self.kind} {name!r} is already registered as {holder}")
            self._entries[name] = entry  # pyright: ignore[reportArgumentType]
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            close = get_close_matches(name, self._entries, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            known = ", ".join(sorted(self._entries))
            raise UnknownName(f"unknown {self.kind} {name!r}.{hint} Known: {known}")
        entry = self._entries[name]
        if isinstance(entry, str) and ":" in entry:
            module, _, attribute = entry.partition(":")
            loaded = getattr(import_module(module), attribute)
            if entry is self._built_in.get(name):
                self._built_in[name] = loaded
            entry = self._entries[name] = loaded
        return entry  # pyright: ignore[reportReturnType]

    def __setitem__(self, name: str, entry: T) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def clear(self) -> None:
        self._entries.clear()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)
