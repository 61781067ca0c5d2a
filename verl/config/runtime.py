"""Fields that are no options: values a worker works out and keeps beside its options.

They live in the section because users' code reads them there (`config.global_batch_info`), but
nobody sets them in a file: the generated YAML and the reference page leave them out.
"""

from collections.abc import Callable
from dataclasses import MISSING, Field, field
from typing import Any


def runtime_value(
    default: Any = MISSING, *, default_factory: Callable[[], Any] | None = None
) -> Any:
    """A field that a worker fills; name it in `_mutable_fields` as well."""
    metadata = {"runtime": True}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def is_option(item: Field[Any]) -> bool:
    """Whether a user sets this field: it is neither the class marker nor a runtime value."""
    return item.name != "_target_" and "runtime" not in item.metadata
