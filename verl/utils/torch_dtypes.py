"""The names people write for floating-point precisions, and the torch types they mean."""

from typing import Any

import torch

_NAMES: dict[torch.dtype, tuple[str | int, ...]] = {
    torch.float16: ("16", 16, "fp16", "float16", "half"),
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float32: ("32", 32, "fp32", "float32", "float"),
    torch.float64: ("64", 64, "fp64", "float64", "double"),
}


class PrecisionType:
    """Accepts `"bf16"`, `"bfloat16"`, `"torch.bfloat16"`, `16`, `torch.float32` and the like."""

    HALF = "16"
    FLOAT = "32"
    FULL = "64"
    BFLOAT = "bf16"

    @staticmethod
    def to_dtype(precision: Any) -> torch.dtype:
        if isinstance(precision, torch.dtype):
            return precision
        name = precision.lower().removeprefix("torch.") if isinstance(precision, str) else precision
        for dtype, names in _NAMES.items():
            if name in names:
                return dtype
        known = ", ".join(PrecisionType.supported_types())
        raise ValueError(f"unknown precision {precision!r}; it must be one of: {known}")

    @staticmethod
    def to_str(precision: Any) -> str:
        """The short name: "fp16", "bf16", "fp32" or "fp64"."""
        dtype = PrecisionType.to_dtype(precision)
        short = {
            torch.float16: "fp16",
            torch.bfloat16: "bf16",
            torch.float32: "fp32",
            torch.float64: "fp64",
        }
        if dtype not in short:
            raise ValueError(f"{dtype} is not a precision; know {', '.join(short.values())}")
        return short[dtype]

    @staticmethod
    def supported_types() -> list[str]:
        return [str(name) for names in _NAMES.values() for name in names if isinstance(name, str)]

    @staticmethod
    def supported_type(precision: Any) -> bool:
        return any(precision in (dtype, *names) for dtype, names in _NAMES.items())

    @staticmethod
    def is_fp16(precision: Any) -> bool:
        return PrecisionType.to_dtype(precision) == torch.float16

    @staticmethod
    def is_bf16(precision: Any) -> bool:
        return PrecisionType.to_dtype(precision) == torch.bfloat16

    @staticmethod
    def is_fp32(precision: Any) -> bool:
        return PrecisionType.to_dtype(precision) == torch.float32
