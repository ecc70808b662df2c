"""The checker checked: what it must let through and what it must catch."""

import pytest
import torch
from accuracy import assert_as_accurate


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16])
def sticks(request):
    """(same_dtype, exact) of a product with a rounding error typical of its dtype."""
    a, b = torch.randn(2, 64, 64, dtype=torch.float64).to(request.param)
    return (a.float() @ b.float()).to(request.param), a.double() @ b.double()


def test_torchs_own_result_passes(sticks):
    same_dtype, exact = sticks
    assert_as_accurate("o", same_dtype.clone(), same_dtype, exact)


def one_more(x):
    x[3, 5] += 0.1 * x.abs().max()
    return x


def one_nan(x):
    x[0, 0] = float("nan")
    return x


WRONG = {
    "all zero": (torch.zeros_like, "error"),
    "one percent too large": (lambda x: x * 1.01, "error"),
    "one value among thousands": (one_more, "worst"),
    "a NaN": (one_nan, "1 values are not finite"),
    "another shape": (lambda x: x[:1], "shape"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_result_fails(sticks, kind):
    same_dtype, exact = sticks
    spoil, message = WRONG[kind]
    with pytest.raises(AssertionError, match=message):
        assert_as_accurate("o", spoil(exact.clone()).to(same_dtype.dtype), same_dtype, exact)
