import pytest
import torch

from verl.utils.torch_dtypes import PrecisionType


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        ("BF16", torch.bfloat16),
        (16, torch.float16),
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("32", torch.float32),
        ("fp32", torch.float32),
        ("float64", torch.float64),
        (torch.float32, torch.float32),
    ],
)
def test_a_precision_has_many_names(written, dtype):
    assert PrecisionType.to_dtype(written) == dtype
    assert PrecisionType.to_dtype(PrecisionType.to_str(written)) == dtype


def test_short_names():
    assert PrecisionType.to_str(torch.bfloat16) == "bf16"
    assert PrecisionType.is_bf16("bfloat16")
    assert PrecisionType.is_fp16(16)
    assert PrecisionType.is_fp32("32")
    assert not PrecisionType.is_fp32("bf16")
    assert PrecisionType.supported_type("bf16")
    assert not PrecisionType.supported_type("fp8")


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match=r"unknown precision 'fp12'; it must be one of: .*bf16"):
        PrecisionType.to_dtype("fp12")
    with pytest.raises(ValueError, match=r"torch\.int8 is not a precision"):
        PrecisionType.to_str(torch.int8)
