"""Loading code by name: modules the user points at, our own on first use, optional packages."""

import functools
import gc
import hashlib
import importlib.util
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from verl.utils.environment import Misuse

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def uncollected() -> Iterator[None]:
    """Import large libraries without the garbage collector, in about two thirds of the time.

    They make half a million objects that stay, and it would look at all of them time and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_external_libs(external_libs: str | Iterable[str] | None) -> None:
    """Import each module for its side effects (registering a model, a loss, a reward)."""
    if external_libs is None:
        return
    names = [external_libs] if isinstance(external_libs, str) else external_libs
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            raise CannotLoad(f"external_lib: cannot import {name!r}: {told(error)}") from error


def lazy_attribute(package: str, table: Mapping[str, str], name: str) -> Any:
    """What a package's `__getattr__` returns: the object that `table` gives as "module:attribute".

    Keeps an import path alive without making the package import what stands behind it. An entry
    without ":attribute" is the module itself; "module:object.member" reaches into an object.
    """
    if name not in table:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module, _, attribute = table[name].partition(":")
    with uncollected():
        loaded = import_module(module)
    return attrgetter(attribute)(loaded) if attribute else loaded


# ---- code the user points at ---------------------------------------------------------------------


class CannotLoad(Misuse, RuntimeError):
    """Code of the user's that raises when it is imported."""


class NoModuleFile(Misuse, FileNotFoundError):
    """A file of the user's that is not there."""


class CannotImport(Misuse, ImportError):
    """A module by name that does not import what it needs."""


class NoSuchModule(Misuse, ModuleNotFoundError):
    """A module by name that is not there, or needs one that is not there."""


class NoSuchName(Misuse, AttributeError):
    """A name that the user's module does not define."""


def load_module(path: str, name: str | None = None) -> ModuleType:
    """Load "pkg://a.b" by import, and "file:///x.py" or a plain path from the file.

    A file is run once until it changes, so what it registers is registered once. With `name` it
    stays in `sys.modules` under that name; without, Ray ships its functions by value, so other
    machines do not need the file. A missing file is `FileNotFoundError`; an error in the module's
    own code is `RuntimeError`, with that error as its cause.
    """
    if path.startswith("pkg://"):
        try:
            return import_module(path.removeprefix("pkg://"))
        except Exception as error:
            raise CannotLoad(f"cannot import {path}: {told(error)}") from error
    file = Path(path.removeprefix("file://")).expanduser().resolve()
    if not file.is_file():
        raise NoModuleFile(f"there is no module file {path!r} (looked at {file})")
    stamp = file.stat()
    if name is None:
        digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
        return _run_file(
            file, f"verl_extern_{file.stem}_{digest}", stamp.st_mtime_ns, stamp.st_size
        )
    holder = sys.modules.get(name)
    if holder is not None and holder.__file__ != str(file):
        raise CannotLoad(f"cannot load {path!r} as {name!r}: that name belongs to {holder!r}")
    sys.modules[name] = _run_file(file, name, stamp.st_mtime_ns, stamp.st_size)
    return sys.modules[name]


@functools.cache
def _run_file(path: Path, name: str, _changed_at: int, _num_bytes: int) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CannotLoad(f"{str(path)!r} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there while the file runs
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CannotLoad(f"cannot load {str(path)!r}: {told(error)}") from error
    finally:
        del sys.modules[name]
    return module


def told(error: Exception) -> str:
    """The error and the line of the imported code that raised it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"  # which names its own file and line
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def load_extern_object(module_path: str, object_name: str) -> Any:
    """The object called `object_name` in the module that `load_module` finds at `module_path`."""
    return _attribute(load_module(module_path), object_name, module_path)


def load_class_from_fqn(fqn: str, description: str = "class") -> Any:
    """The class behind "package.module.Class"; `description` says in errors what it is for."""
    module_name, _, class_name = fqn.rpartition(".")
    if not module_name:
        raise ValueError(
            f"{description} {fqn!r} must be a full name such as 'package.module.ClassName'"
        )
    try:
        module = import_module(module_name)
    except ImportError as error:
        kind = NoSuchModule if isinstance(error, ModuleNotFoundError) else CannotImport
        raise kind(
            f"cannot import module {module_name!r} for {description} {fqn!r}: {error}"
        ) from error
    return _attribute(module, class_name, f"{module_name} ({description})")


def _attribute(module: ModuleType, name: str, where: str) -> Any:
    try:
        return getattr(module, name)  # a module may make its names when they are asked for
    except AttributeError as error:
        defined = [item for item in dir(module) if not item.startswith("_")]
        close = get_close_matches(name, defined, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        listed = ", ".join(sorted(defined)) or "nothing"
        text = f"{where} does not define {name!r}.{hint} It defines: {listed}"
        raise NoSuchName(text) from error


# ---- names that are on their way out -------------------------------------------------------------


def deprecated(replacement: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function or class: using it warns once per place and names the replacement."""

    def decorate(item: Callable[P, R]) -> Callable[P, R]:
        hint = f"; use {replacement}" if replacement else ""
        message = f"{item.__module__}.{item.__qualname__} is deprecated{hint}"
        if isinstance(item, type):
            return _deprecated_class(item, message)  # pyright: ignore[reportReturnType]

        @functools.wraps(item)
        def warned(*args: P.args, **kwargs: P.kwargs) -> R:
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return item(*args, **kwargs)

        return warned

    return decorate


def _deprecated_class(item: type, message: str) -> type:
    """The class itself, so that subclassing and isinstance still work; creating one warns."""
    create = item.__init__

    @functools.wraps(create)
    def warned(self: Any, *args: Any, **kwargs: Any) -> None:
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        create(self, *args, **kwargs)

    item.__init__ = warned
    return item


@deprecated("verl.utils.import_utils.load_extern_object")
def load_extern_type(file_path: str, type_name: str) -> Any:
    return load_extern_object(file_path, type_name)


# ---- packages that may be missing ----------------------------------------------------------------


def is_available(package: str) -> bool:
    """Whether `package` could be imported; it is not imported to find out."""
    return package in sys.modules or _spec_of(package) is not None  # a stand-in has no spec


def _spec_of(package: str) -> ModuleSpec | None:
    """`importlib.util.find_spec` would import the packages above it."""
    parent, _, _ = package.rpartition(".")
    if not parent or parent in sys.modules:
        return importlib.util.find_spec(package)
    above = _spec_of(parent)
    places = above.submodule_search_locations if above is not None else None
    return PathFinder.find_spec(package, list(places)) if places else None


def require(package: str, extra: str | None = None) -> ModuleType:
    """Import an optional package, or say how to install it: `require("ray", extra="ray")`."""
    if not is_available(package):
        name = package.partition(".")[0].replace("_", "-")
        cure = f"pip install verl[{extra}]" if extra else f"pip install {name}"
        raise ImportError(f"this needs the package {package!r}, which is not installed: {cure}")
    return import_module(package)


def is_vllm_available() -> bool:
    return is_available("vllm")


def is_sglang_available() -> bool:
    return is_available("sglang")


def is_megatron_core_available() -> bool:
    return is_available("megatron.core")


def is_nvtx_available() -> bool:
    return is_available("nvtx")


def is_trl_available() -> bool:
    return is_available("trl")


def is_msprobe_available() -> bool:
    return is_available("msprobe")


def is_ray_available() -> bool:
    return is_available("ray")
