"""The library's accuracy rule as an assertion."""

import torch
from torch import Tensor

from workbook.lab.measure.accuracy import AccuracyError, hold


def assert_as_accurate(
    name: str,
    got: Tensor,
    same_dtype: Tensor,
    exact: Tensor,
    slack: float = 2.0,
    magnitude: float = 0.0,
) -> None:
    """Holds `got` to the library's `hold`, in the dtype of same_dtype, and its shape to exact's.

    same_dtype: the reference in got's dtype, on the same inputs; its error is the measuring stick.
    """
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(exact.shape)}"
    dtype = same_dtype.dtype
    try:
        hold(name, got, same_dtype, exact, dtype=dtype, slack=slack, magnitude=magnitude)
    except AccuracyError as red:
        raise AssertionError(str(red)) from None


def assert_same(got: Tensor, want: Tensor, name: str = "") -> None:
    """Equal bits where kernels are interpreted.

    On a GPU other strides are other machine code, which rounds in another order.
    """
    if got.is_cuda:
        torch.testing.assert_close(got, want, msg=lambda text: f"{name}: {text}")
    else:
        assert torch.equal(got, want), name
