"""Configuration sections: frozen dataclasses that are also read-only mappings.

The fields of a section are the options: the default is written once, the sentence below the field
documents it, `option(...)` adds the rule its value must obey and the rule when it has an effect.
Users' code reads sections as objects and as mappings: `config.actor["clip_ratio"]`,
`config.data.get("gen_batch_size", 512)`. Keys that a user adds with `+key=` and that no field
declares live in `extras`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, ClassVar, TypeVar

Section = TypeVar("Section", bound="BaseConfig")


@dataclass(frozen=True)
class When:
    """A condition under which an option has an effect, and the reason given when it has none.

    `holds` takes the section that has the option and the configuration of the whole run.
    """

    holds: Callable[[Any, Any], bool]
    reason: str
    is_never: bool = False


def never(reason: str) -> When:
    """The condition of an option that is accepted and has no effect."""
    return When(lambda here, run: False, reason, is_never=True)


def while_on(switch: str) -> When:
    """The condition of options that a switch beside them turns on."""
    return When(lambda here, run: bool(here[switch]), f"{switch} is off")


@dataclass(frozen=True)
class Absent:
    """Values of an option that ask for something that does not exist here.

    `values` lists them; None means every value but the default, null, False, 0 and empty ones.
    `unless` takes the section and the whole configuration: where it holds, code of the user's own
    may implement what is asked for.
    """

    reason: str
    values: tuple[Any, ...] | None = None
    unless: Callable[[Any, Any], bool] | None = None

    def covers(self, value: Any, default: Any) -> bool:
        if self.values is not None:
            return value in self.values
        return bool(value) and value != default


def option(
    default: Any = MISSING,
    *,
    default_factory: Callable[[], Any] | None = None,
    yaml: Any = None,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    used_if: When | tuple[When, ...] | None = None,
    absent: Absent | None = None,
    reads: tuple[str, ...] | None = None,
    unread: str = "",
    reads_all_if: When | None = None,
    ignores: Mapping[str, str] | None = None,
) -> Any:
    """A field with rules. `minimum` and `maximum` are inclusive, `above` is exclusive.

    `yaml` is the interpolation that the generated YAML holds where the default follows another
    key, as in `"${oc.select:actor_rollout_ref.rollout.n,1}"`; `default` is what it falls back to.
    It may be a plain value where a section corrects its own default.

    `used_if` says when the option, or a section with all that is below it, has an effect; all its
    conditions must hold. `absent` marks values that are refused because what they ask for does not
    exist. `reads` lists the keys of a shared section that have an effect where this field mounts
    it; for the others `unread` is the reason, unless `reads_all_if` holds. `ignores` has keys of a
    free dict that have no effect, with the reasons.
    """
    rule = {
        "yaml": yaml,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "used_if": (used_if,) if isinstance(used_if, When) else used_if,
        "absent": absent,
        "ignores": ignores,
        "reads": None if reads is None else (reads, unread, reads_all_if),
    }
    metadata = {name: value for name, value in rule.items() if value is not None}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def runtime_value(
    default: Any = MISSING, *, default_factory: Callable[[], Any] | None = None
) -> Any:
    """A field that a worker fills and that nobody sets; name it in `_mutable_fields` as well.

    It is in the section because users' code reads it there (`config.global_batch_info`); the
    generated YAML and the reference page leave it out.
    """
    metadata = {"runtime": True}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def is_option(item: Field[Any]) -> bool:
    """Whether a user sets this field: it is neither the class marker nor a runtime value."""
    return item.name != "_target_" and "runtime" not in item.metadata


class MissingOption(KeyError, AttributeError):
    """A key that a section lacks: the error of a mapping, and of an attribute."""


@dataclass(kw_only=True)
class BaseConfig(Mapping[str, Any]):
    """A frozen section; the fields named in `_mutable_fields` may change after construction."""

    _mutable_fields: ClassVar[set[str]] = set()
    _other_targets: ClassVar[tuple[str, ...]] = ()
    """Classes that files of older scripts name as `_target_` of this section."""

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
        if not vars(self).get("_is_frozen") or name in self._mutable_fields:
            object.__setattr__(self, name, value)
        elif name in vars(self) or name in vars(self)["extras"]:
            raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot change after creation")
        else:  # a value that a program attaches, once
            vars(self)["extras"][name] = value

    def __getattr__(self, name: str) -> Any:  # only for what is neither field nor method
        extras = vars(self).get("extras", {})
        if name not in extras:
            is_asked_by_python = name.startswith("__")  # as copying does, of every section
            known = () if is_asked_by_python else type(self).__dataclass_fields__
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise AttributeError(f"{type(self).__name__} has no option {name!r}{hint}")
        return extras[name]

    def __getitem__(self, key: str) -> Any:
        if not isinstance(key, str):
            raise TypeError(f"the keys of {type(self).__name__} are names, not {key!r}")
        if key not in self.__dataclass_fields__ and key not in vars(self)["extras"]:
            raise MissingOption(key)
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
        if not isinstance(one, int | float):
            continue
        if "minimum" in rule and not one >= rule["minimum"]:
            yield f"{path} is {one}; it must be at least {rule['minimum']}"
        if "maximum" in rule and not one <= rule["maximum"]:
            yield f"{path} is {one}; it must be at most {rule['maximum']}"
        if "above" in rule and not one > rule["above"]:
            yield f"{path} is {one}; it must be greater than {rule['above']}"
