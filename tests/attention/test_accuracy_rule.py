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


def test_an_all_zero_result_fails(sticks):
    same_dtype, exact = sticks
    with pytest.raises(AssertionError, match="error"):
        assert_as_accurate("o", torch.zeros_like(same_dtype), same_dtype, exact)


def test_a_result_that_is_one_percent_too_large_fails(sticks):
    same_dtype, exact = sticks
    with pytest.raises(AssertionError, match="error"):
        assert_as_accurate("o", (exact * 1.01).to(same_dtype.dtype), same_dtype, exact)


def test_one_wrong_value_among_thousands_fails(sticks):
    same_dtype, exact = sticks
    got = same_dtype.clone()
    got[3, 5] += 0.1 * exact.abs().max()
    with pytest.raises(AssertionError, match="worst"):
        assert_as_accurate("o", got, same_dtype, exact)


def test_a_nan_fails(sticks):
    same_dtype, exact = sticks
    got = same_dtype.clone()
    got[0, 0] = float("nan")
    with pytest.raises(AssertionError, match="1 values are not finite"):
        assert_as_accurate("o", got, same_dtype, exact)


def test_a_wrong_shape_fails(sticks):
    same_dtype, exact = sticks
    with pytest.raises(AssertionError, match="shape"):
        assert_as_accurate("o", same_dtype[:1], same_dtype, exact)
