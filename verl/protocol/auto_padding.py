"""Whether a batch may be cut into chunks of unequal size.

Off by default: a batch that does not divide is an error, because unequal shares of work usually are
a mistake in a batch size. It is switched on for one batch by its `meta_info`, for a program by
`DataProtoConfig.auto_padding = True`, and from outside by the variable `VERL_AUTO_PADDING`.
"""

from verl.utils.environment import auto_padding as auto_padding_from_environment
from verl.utils.tensor_rows import BatchError


class _AutoPadding(type):
    """Makes `auto_padding` a property of the class itself."""

    _is_enabled = False

    @property
    def auto_padding(cls) -> bool:
        return cls._is_enabled or auto_padding_from_environment()

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise BatchError(f"DataProtoConfig.auto_padding is True or False, got {enabled!r}")
        cls._is_enabled = enabled


class DataProtoConfig(metaclass=_AutoPadding):
    """Settings of all batches in this process; nothing is instantiated."""

    auto_padding_key = "_verl_auto_padding"
    """The `meta_info` key that switches padding on for one batch."""
