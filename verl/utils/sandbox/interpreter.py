"""What a Python program needs of this machine, and where it finds it inside the sandbox.

    /python      this interpreter and its standard library, without installed packages
    /packages    the packages asked for
    /usr/lib     shared libraries of the system

Paths inside say nothing about paths outside.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_NAME = f"python{sys.version_info.major}.{sys.version_info.minor}"
_SYSTEM_FOLDERS = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")
PYTHON = f"/python/bin/{_NAME}"
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": "/python/lib",
    "MALLOC_ARENA_MAX": "2",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": "/packages",
}
"""The whole environment of a program; nothing is inherited."""

Mount = tuple[str, str]


@dataclass(frozen=True)
class View:
    mounts: list[Mount]
    """(path outside, path inside)"""
    links: list[tuple[str, str]]
    """(target, path inside)"""
    hidden: list[str]
    """Directories inside that look empty."""


def view_of_interpreter(packages: Sequence[str]) -> View:
    mounts = [*_interpreter(), *_system_libraries()]
    for package in packages:
        mounts += _package(package)
    standard_library = Path(os.__file__).parent
    hidden = [
        f"/python/lib/{_NAME}/{name}"
        for name in ("site-packages", "dist-packages")
        if (standard_library / name).is_dir()
    ]
    return View(mounts, list(_system_links()), hidden)


def _interpreter() -> Iterator[Mount]:
    """An interpreter with a folder of its own may keep more libraries beside its standard library;
    one of the system finds them among the system's."""
    standard_library = os.path.realpath(os.path.dirname(os.__file__))
    folder = os.path.dirname(standard_library)
    yield os.path.realpath(sys.executable), PYTHON
    if folder not in _SYSTEM_FOLDERS:
        yield folder, "/python/lib"
        return
    yield standard_library, f"/python/lib/{_NAME}"
    extensions = sysconfig.get_config_var("DESTSHARED") or ""
    if os.path.isdir(extensions) and os.path.dirname(extensions) != standard_library:
        yield os.path.realpath(extensions), f"/python/lib64/{_NAME}/lib-dynload"


def _system_libraries() -> Iterator[Mount]:
    """Where libraries are sorted by architecture, only those of ours, and the loader."""
    architecture = sysconfig.get_config_var("MULTIARCH") or ""
    for folder in map(Path, _SYSTEM_FOLDERS):
        if folder.is_symlink() or not folder.is_dir():
            continue
        ours = folder / architecture if (folder / architecture).is_dir() else folder
        yield str(ours), str(ours)
        if ours != folder:
            for loader in folder.glob("ld-*.so*"):
                yield str(loader.resolve()), str(loader)


def _system_links() -> Iterator[tuple[str, str]]:
    for folder in ("/lib", "/lib64"):
        if os.path.islink(folder):
            yield os.readlink(folder), folder


def _package(name: str) -> Iterator[Mount]:
    """A package and the shared libraries its wheel brings along; nothing if it is not installed."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return
    place = Path(spec.origin)
    place = place.parent if spec.submodule_search_locations else place
    for path in (place, place.with_name(f"{name}.libs")):
        if path.exists():
            yield str(path.resolve()), f"/packages/{path.name}"
