"""From plain mappings to sections, with every mistake reported rather than the first one.

The type hints of the dataclasses are the rules. A value that means the same is accepted in the
form a command line or a YAML file gives it ("1e-6" for a float, 8.0 for an int, "None" where None
is allowed, one string for a list of strings); anything else is a fault that names the key.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from typing import Any, Literal, cast, get_args, get_origin

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl.config.base import BaseConfig, FreeSection
from verl.config.faults import ConfigError, Fault, shown
from verl.config.schema import Keys, section_classes, type_hints, union_members

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0", "")


class Mismatch(Exception):
    """A value that cannot be read as the wanted type; the message says what was wanted."""


class Conversion:
    """One pass over a tree of values: sections made, faults and unknown keys met."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.unknown: list[str] = []

    def section(self, cls: type[Any], values: Mapping[str, Any], path: str = "") -> Any:
        """Make a section; where a value is at fault the default stands in, so that we can go on."""
        hints = type_hints(cls)
        arguments: dict[str, Any] = {}
        for item in fields(cls):
            if item.name in values:
                self._option(item, hints[item.name], values[item.name], path, arguments)
        declared = {item.name for item in fields(cls)} | {"_target_"}
        extras = {name: free(value) for name, value in values.items() if name not in declared}
        self.unknown += [join(path, name) for name in extras]
        made = self._construct(cls, arguments, path)
        if isinstance(made, BaseConfig):
            vars(made)["extras"].update(extras)
        return made

    def _option(
        self, item: Field[Any], hint: Any, value: Any, path: str, arguments: dict[str, Any]
    ) -> None:
        key = join(path, item.name)
        classes = section_classes(hint)
        try:
            if classes and isinstance(value, Mapping):
                cls = chosen_class(item, classes, value)
                arguments[item.name] = self.section(cls, value, key)
            elif value is not None or not is_plain(hint):  # null leaves a number or text as it is
                arguments[item.name] = converted(value, hint)
        except Mismatch as mismatch:
            text = f"{key} is {shown(value)} ({type(value).__name__}); it must be {mismatch}"
            self.faults.append(Fault(text, (key,)))
        except ValueError as error:
            self.faults.append(Fault(join(key, str(error)), (key,)))

    def _construct(self, cls: type[Any], arguments: dict[str, Any], path: str) -> Any:
        try:
            return cls(**arguments)
        except ValueError as error:
            names = set()
            for line in str(error).splitlines():
                names.add(line.split()[0])
                self.faults.append(Fault(join(path, line), (join(path, line.split()[0]),)))
            sound = {name: value for name, value in arguments.items() if name not in names}
            return unchecked(cls, sound)


def is_plain(hint: Any) -> bool:
    """Whether an option is a number, a text or a switch, and nothing else."""
    return all(member in SCALARS for member in union_members(hint))


def converted(value: Any, hint: Any) -> Any:
    """`value` as an instance of `hint`; raises Mismatch with a description of what is wanted."""
    members = union_members(hint)
    if value is None or (value == "None" and type(None) in members):
        if type(None) in members or Any in members:
            return None
        raise Mismatch(described(hint))
    for member in members:  # an exact match wins over one that needs conversion
        if member is Any or (isinstance(member, type) and type(value) is member):
            return value
    for member in members:
        try:
            return converted_to(value, member)
        except Mismatch:
            continue
    raise Mismatch(described(hint))


def converted_to(value: Any, member: Any) -> Any:
    """Convert to one type that is not a union."""
    origin = get_origin(member) or member
    if origin in SCALARS:
        return SCALARS[origin](value)
    if origin in (list, tuple):
        return sequence(value, member)
    if origin is dict and isinstance(value, Mapping):
        _, element = get_args(member) or (Any, Any)
        return {key: converted(one, element) for key, one in value.items()}
    if origin is Literal and value in get_args(member):
        return value
    raise Mismatch(described(member))


def as_bool(value: Any) -> bool:
    word = str(value).lower()
    if word in TRUE_WORDS or word in FALSE_WORDS:
        return word in TRUE_WORDS
    raise Mismatch(described(bool))


def as_int(value: Any) -> int:
    number = as_float(value)
    if not number.is_integer():
        raise Mismatch(described(int))
    return value if isinstance(value, int) else int(number)


def as_float(value: Any) -> float:
    try:
        number = float("bool" if isinstance(value, bool | Mapping | list) else value)
    except (ValueError, TypeError):
        raise Mismatch(described(float)) from None
    if number != number:
        raise Mismatch(described(float))
    return number


def as_str(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise Mismatch(described(str))


SCALARS = {bool: as_bool, int: as_int, float: as_float, str: as_str}


def sequence(value: Any, member: Any) -> Any:
    element = (get_args(member) or (Any,))[0]
    if isinstance(value, str) and element is str:
        value = [value]
    if not isinstance(value, list | tuple):
        raise Mismatch(described(member))
    return (get_origin(member) or member)(converted(one, element) for one in value)


def described(hint: Any) -> str:
    """A type as a message names it: "a float", "an int or null", "a list of str"."""
    names = {bool: "a bool (True or False)", int: "an int", float: "a float", str: "a str"}
    described_members = []
    for member in union_members(hint):
        origin = get_origin(member) or member
        if origin in (list, tuple):
            element = (get_args(member) or (Any,))[0]
            plain = element.__name__ if isinstance(element, type) else "values"
            described_members.append(f"a list of {plain}")
        elif origin is dict or is_dataclass(origin):
            described_members.append("a mapping")
        elif origin is Literal:
            described_members.append("one of " + ", ".join(map(str, get_args(member))))
        elif member is type(None):
            described_members.append("null")
        else:
            described_members.append(names.get(member, str(member)))
    return " or ".join(dict.fromkeys(described_members))


def chosen_class(item: Field[Any], classes: list[type], values: Mapping[str, Any]) -> type:
    """The dataclass for a section: what `_target_` names, else the default's, else the first."""
    usual = default_class(item, classes)
    target = str(values.get("_target_") or "")
    if target in ("", type_target(usual), *usual._other_targets):
        return usual
    name = target.rpartition(".")[2]
    named = next((cls for cls in with_subclasses(classes) if cls.__name__ == name), None)
    named = named or load_target(target)
    if not issubclass(named, tuple(classes)):
        allowed = ", ".join(cls.__name__ for cls in classes)
        raise ValueError(f"_target_ is {shown(target)}; here it must name a subclass of {allowed}")
    return named


def with_subclasses(classes: list[type]) -> Iterator[type]:
    for cls in classes:
        yield cls
        yield from with_subclasses(cls.__subclasses__())


def type_target(cls: type[Any]) -> str:
    return next((str(item.default) for item in fields(cls) if item.name == "_target_"), "")


def default_class(item: Field[Any], classes: list[type]) -> type:
    default = item.default_factory() if item.default_factory is not MISSING else item.default
    return type(default) if isinstance(default, tuple(classes)) else classes[0]


def unchecked(cls: type[Any], arguments: dict[str, Any]) -> Any:
    """A section whose rules are broken, with defaults for the rest, so that we can go on."""
    made = object.__new__(cls)
    for item in fields(cls):
        if item.name in arguments:
            value = arguments[item.name]
        elif item.default_factory is not MISSING:
            value = item.default_factory()
        else:
            value = item.default
        object.__setattr__(made, item.name, value)
    object.__setattr__(made, "extras", {})
    return made


def free(value: Any) -> Any:
    """An undeclared value; a mapping becomes a section, so that it is read by attribute too."""
    if not isinstance(value, Mapping):
        return value
    section = FreeSection()
    vars(section)["extras"].update({str(key): free(one) for key, one in value.items()})
    return section


def load_target(path: str) -> type[Any]:
    """The dataclass that `_target_: package.module.Class` names. Nothing else may be named."""
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(import_module(module), name) if module else None
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"_target_ is {path!r}, but {error}") from error
    if not (isinstance(cls, type) and is_dataclass(cls)):
        raise ValueError(f"_target_ is {path!r}; it must name a dataclass, as package.module.Class")
    return cls


def omega_conf_to_dataclass(
    config: DictConfig | Mapping[str, Any] | None, dataclass_type: type[Any] | None = None
) -> Any:
    """Make the section that a piece of configuration describes.

    An empty configuration gives `dataclass_type()` (None without a type); what is no mapping, or
    is a section already, is returned as it is. Without a type, `_target_` must name the dataclass.
    """
    if not config and not isinstance(config, BaseConfig):
        return dataclass_type() if dataclass_type is not None else None
    if isinstance(config, BaseConfig) or not isinstance(config, DictConfig | Mapping):
        return config
    values = plain(config)
    if dataclass_type is None:
        if not values.get("_target_"):
            raise ValueError(
                f"the configuration with the keys {sorted(values)} names no _target_; "
                "pass dataclass_type, or add _target_: package.module.Class"
            )
        dataclass_type = load_target(values["_target_"])
    conversion = Conversion()
    made = conversion.section(dataclass_type, values)
    faults = conversion.faults + unknown_faults(conversion.unknown, Keys(made))
    if faults:
        raise ConfigError(faults)
    return made


def update_dict_with_config(dictionary: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Replace the values of `dictionary` by those that `config` has under the same keys."""
    for key in dictionary:
        if key in config:
            dictionary[key] = config[key]


def unknown_faults(unknown: list[str], keys: Keys) -> list[Fault]:
    return [Fault(unknown_text(path, keys), (path,)) for path in unknown]


def unknown_text(path: str, keys: Keys) -> str:
    close = keys.closest(path)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"unknown option {path}{hint}"


def plain(config: Any) -> Any:
    """A resolved copy made of dicts, lists and scalars."""
    if isinstance(config, DictConfig | ListConfig):
        return OmegaConf.to_container(config, resolve=True)
    return config


def to_dict(section: BaseConfig | DictConfig) -> dict[str, Any]:
    """The values below a section, extras included, as plain dicts and lists, unlogged."""
    if isinstance(section, DictConfig):
        return cast(dict[str, Any], OmegaConf.to_container(section, resolve=True))
    state = vars(section)
    values = {item.name: state[item.name] for item in fields(section)} | state["extras"]
    return {
        name: to_dict(value) if isinstance(value, BaseConfig) else value
        for name, value in values.items()
        if name != "_target_" or value
    }


def to_dictconfig(section: BaseConfig) -> DictConfig:
    """The resolved configuration as users' hooks and recipes expect it."""
    config = OmegaConf.create(to_dict(section))
    OmegaConf.set_struct(config, True)
    return config


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
