"""Small helpers on plain Python objects: dictionaries, enumerations that users extend, namespaces.

Nothing here knows torch. `timeout_limit` lives in `verl.utils.timeout` and `temp_env_var` in
`verl.utils.environment`; both are re-exported because this is where users import them from.
"""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl.utils.environment import temp_env_var
from verl.utils.timeout import timeout_limit

__all__ = [
    "DynamicEnum",
    "DynamicEnumMeta",
    "NestedNamespace",
    "append_to_dict",
    "convert_to_regular_types",
    "rename_dict",
    "temp_env_var",
    "timeout_limit",
    "union_two_dict",
]

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
