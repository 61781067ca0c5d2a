"""What every section of the configuration has in common.

A section is a dataclass whose fields are the options: the default is written once, the sentence
below the field is its documentation, `option(...)` adds the rule its value must obey. A section
also behaves as a read-only mapping, because users' code reads it as `config.actor["clip_ratio"]`
and `config.data.get("gen_batch_size", 512)`.

Keys that a user adds with `+key=` and that no field declares live in `extras`. When a `ReadLog` is
attached, each read of a field or an extra is noted, so that a run can name what nothing read.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, ClassVar, TypeVar

Section = TypeVar("Section", bound="BaseConfig")


def option(
    default: Any = MISSING,
    *,
    default_factory: Callable[[], Any] | None = None,
    yaml: str | None = None,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> Any:
    """A field with a rule. `minimum` and `maximum` are inclusive, `above` is exclusive.

    `yaml` is the interpolation that the generated YAML holds where the default follows another
    key, as in `"${oc.select:actor_rollout_ref.rollout.n,1}"`; `default` is what it falls back to.
    """
    rule = {"choices": choices, "minimum": minimum, "maximum": maximum, "above": above}
    metadata = {"yaml": yaml, **{name: limit for name, limit in rule.items() if limit is not None}}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


class ReadLog:
    """The dotted paths of the options that were read."""

    def __init__(self) -> None:
        self.paths: set[str] = set()

    def attach(self, config: "BaseConfig", path: str = "") -> None:
        """Note every read below `config` from now on."""
        object.__setattr__(config, "_read_log", self)
        object.__setattr__(config, "_path", path)
        for name, value in [*vars(config).items(), *vars(config)["extras"].items()]:
            if isinstance(value, BaseConfig):
                self.attach(value, f"{path}.{name}" if path else name)

    def has_read(self, path: str) -> bool:
        """Whether the option at `path`, or the free dict it lies in, was read."""
        parts = path.split(".")
        return any(".".join(parts[:end]) in self.paths for end in range(1, len(parts) + 1))

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReadLog":
        return self  # a copied section reports to the log of the original


@dataclass(kw_only=True)
class BaseConfig(Mapping[str, Any]):
    """A frozen section; the fields named in `_mutable_fields` may change after construction."""

    _mutable_fields: ClassVar[set[str]] = set()

    _target_: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "extras", {})
        faults = list(self.faults())
        if faults:
            raise ValueError("\n".join(faults))
        object.__setattr__(self, "_is_frozen", True)

    def faults(self, path: str = "") -> Iterator[str]:
        """A sentence for each value that breaks its own rule, beginning with `path` and the field.

        Sections add rules about their own fields by extending this.
        """
        for item in fields(self):
            yield from rule_faults(item, vars(self)[item.name], f"{path}{item.name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if vars(self).get("_is_frozen") and name not in self._mutable_fields:
            raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot change after creation")
        object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("_") and not isinstance(value, BaseConfig):
            log = object.__getattribute__(self, "__dict__").get("_read_log")
            if log is not None and name in object.__getattribute__(self, "__dataclass_fields__"):
                path = object.__getattribute__(self, "_path")
                log.paths.add(f"{path}.{name}" if path else name)
        return value

    def __getattr__(self, name: str) -> Any:  # only for what is neither field nor method
        state = vars(self)
        if name not in state.get("extras", {}):
            close = get_close_matches(name, type(self).__dataclass_fields__, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise AttributeError(f"{type(self).__name__} has no option {name!r}{hint}")
        value = state["extras"][name]
        if "_read_log" in state and not isinstance(value, BaseConfig):
            path = state["_path"]
            state["_read_log"].paths.add(f"{path}.{name}" if path else name)
        return value

    def __getitem__(self, key: str) -> Any:
        if key not in self.__dataclass_fields__ and key not in vars(self)["extras"]:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        yield from (item.name for item in fields(self))
        yield from vars(self)["extras"]

    def __len__(self) -> int:
        return len(fields(self)) + len(vars(self)["extras"])


@dataclass(kw_only=True)
class FreeSection(BaseConfig):
    """A section that no dataclass declares: all it holds are the user's own keys."""


def rule_faults(item: Field[Any], value: Any, path: str) -> Iterator[str]:
    """What `option(...)` says about one value (or each one of a list); None obeys every rule."""
    rule = item.metadata
    for one in value if isinstance(value, list) else [value]:
        if "choices" in rule and one is not None and one not in rule["choices"]:
            close = get_close_matches(str(one), map(str, rule["choices"]), n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            known = ", ".join(map(str, rule["choices"]))
            yield f"{path} is {one!r}; it must be one of: {known}{hint}"
        if isinstance(one, int | float):
            yield from limit_faults(rule, one, path)


def limit_faults(rule: Mapping[str, Any], value: float, path: str) -> Iterator[str]:
    if "minimum" in rule and not value >= rule["minimum"]:
        yield f"{path} is {value}; it must be at least {rule['minimum']}"
    if "maximum" in rule and not value <= rule["maximum"]:
        yield f"{path} is {value}; it must be at most {rule['maximum']}"
    if "above" in rule and not value > rule["above"]:
        yield f"{path} is {value}; it must be greater than {rule['above']}"
