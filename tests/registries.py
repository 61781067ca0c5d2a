"""Registries that a test fills, and that are afterwards what they were."""

from collections.abc import Iterator
from contextlib import contextmanager

from verl.utils.registry import Registry


@contextmanager
def restored(*registries: Registry) -> Iterator[None]:
    before = [(dict(registry._entries), dict(registry._built_in)) for registry in registries]
    try:
        yield
    finally:
        for registry, (entries, built_in) in zip(registries, before, strict=True):
            registry._entries, registry._built_in = entries, built_in
