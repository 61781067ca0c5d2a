"""Every name users import exists, and takes the arguments they pass."""

import ast
import importlib
import inspect
from inspect import Parameter

import pytest

from tests.compat.surface import PRESENT

ANY = object()
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def entries(text: str) -> list[str]:
    """The entries of a module; one whose bracket is open goes on in the next line."""
    found = [""]
    for line in text.split("\n"):
        found[-1] += line.strip()
        if found[-1].count("(") == found[-1].count(")"):
            found.append("")
    return [entry for entry in found if entry]


def find(module: str, path: str):
    """The object at a dotted path, and whether it is a method that still wants its `self`."""
    holder, target = None, importlib.import_module(module)
    for name in path.split("."):
        holder, target = target, getattr(target, name)
    wants_self = inspect.isclass(holder) and inspect.isfunction(
        inspect.getattr_static(holder, path.rpartition(".")[2])
    )
    return target, wants_self


def has_member(module: str, path: str) -> bool:
    """Also true for what instances of a class have: its annotations and what `__init__` assigns."""
    owner, _, member = path.rpartition(".")
    target = importlib.import_module(module)
    for name in owner.split(".") if owner else []:
        target = getattr(target, name, None)
    try:
        inspect.getattr_static(target, member)
    except AttributeError:
        if not inspect.isclass(target):
            return getattr(target, member, None) is not None  # a module's lazy names
        sources = [inspect.getsource(kind) for kind in target.__mro__ if kind is not object]
        return any(f"self.{member}" in source for source in sources)
    return True


@pytest.mark.parametrize("module", PRESENT)
def test_the_module_has_its_names_and_they_take_what_callers_pass(module):
    importlib.import_module(module)
    wrong: list[str] = []
    for line in entries(PRESENT[module]):
        name = line.partition("(")[0]
        if not has_member(module, name):
            wrong.append(f"{name} does not exist")
        elif "(" in line:
            target, wants_self = find(module, name)
            actual = list(inspect.signature(target).parameters.values())[wants_self:]
            wrong += [f"{name}: {fault}" for fault in faults(line, actual)]
    assert wrong == []


# ---- comparing signatures ------------------------------------------------------------------------


def faults(line: str, actual: list[Parameter]) -> list[str]:
    """What is wrong with the parameters of a callable, given the line that promises them."""
    promised = expected_parameters(line)
    is_open = line.endswith("*")
    positional = [p for p in actual if p.kind in POSITIONAL]
    found = []
    for place, (name, default) in enumerate(promised):
        if place >= len(positional):
            found.append(f"parameter {name!r} is missing or cannot be passed by position")
            continue
        parameter = positional[place]
        if name not in ("_", parameter.name):
            found.append(f"parameter {place} is {parameter.name!r}, not {name!r}")
        found += default_faults(parameter, default)
    further = positional[len(promised) :] + [p for p in actual if p.kind is Parameter.KEYWORD_ONLY]
    required = [p.name for p in further if p.default is Parameter.empty]
    if required and not is_open:
        found.append(f"callers do not pass {required}")
    return found


def default_faults(parameter: Parameter, default: object) -> list[str]:
    if default is Parameter.empty:
        return []  # callers always pass it; a default does no harm
    if parameter.default is Parameter.empty:
        return [f"{parameter.name!r} has no default"]
    if default is not ANY and parameter.default != default:
        return [f"{parameter.name!r} defaults to {parameter.default!r}, not {default!r}"]
    return []


def expected_parameters(line: str) -> list[tuple[str, object]]:
    """[("key", empty), ("default", None)] from "get(key, default=None)"."""
    signature = line[line.index("(") : line.rindex(")") + 1]
    call = ast.parse("f" + signature, mode="eval").body
    assert isinstance(call, ast.Call)
    required = [(ast.unparse(argument), Parameter.empty) for argument in call.args]
    optional = [(keyword.arg, value_of(keyword.value)) for keyword in call.keywords]
    return [*required, *optional]


def value_of(node: ast.expr) -> object:
    value = ast.literal_eval(node)
    return ANY if value is Ellipsis else value


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("f(a, b=1)", []),
        ("f(a, b=...)", []),
        ("f(_, b=1)", []),
        ("f(a)", []),  # `b` and `c` have defaults
        ("f(a, b=2)", ["'b' defaults to 1, not 2"]),
        ("f(b, a)", ["parameter 0 is 'a', not 'b'", "parameter 1 is 'b', not 'a'"]),
        ("f()", ["callers do not pass ['a']"]),
        ("f()*", []),
        ("f(a=1)", ["'a' has no default"]),
        ("f(a, b=1, c=None)", ["parameter 'c' is missing or cannot be passed by position"]),
    ],
)
def test_signatures_are_compared_as_callers_see_them(line, found):
    def f(a, b=1, *, c=None): ...

    assert faults(line, list(inspect.signature(f).parameters.values())) == found
