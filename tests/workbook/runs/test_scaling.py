import math

import numpy as np
import pytest

from workbook.runs.scaling import (
    Fit,
    Slope,
    fit_exponent,
    fit_line,
    local_exponents,
    paired_ratio,
    robust_slope,
)


def test_local_exponents_of_a_power_are_that_power():
    x = [128, 256, 1024, 2048]
    assert local_exponents(x, [3 * t**1.56 for t in x]) == pytest.approx([1.56] * 3)


def test_local_exponents_of_a_sum_rise_from_the_low_power_to_the_high_one():
    x = 2.0 ** np.arange(4, 16)
    found = local_exponents(x, 1e4 * x + x**2)
    assert found[0] == pytest.approx(1, abs=0.01) and found[-1] > 1.6
    assert (np.diff(found) > 0).all()


def test_a_failed_point_leaves_a_gap_beside_it_only():
    found = local_exponents([1, 2, 4, 8], [1, 2, math.nan, 8])
    assert found[0] == pytest.approx(1) and np.isnan(found[1:]).all()


def test_the_fit_of_an_exact_power_has_no_width():
    x = [128, 256, 512, 1024]
    fit = fit_exponent(x, [0.1 * t**1.22 for t in x])
    assert (fit.exponent, fit.low, fit.high) == pytest.approx((1.22, 1.22, 1.22))
    assert fit.n == 4


def test_the_fit_agrees_with_a_case_worked_by_hand():
    # u = -1, 0, 1 and v = 0, 1, 1 in units of ln 10: slope 1/2, residual sum 1/6, t(1) = 12.706
    fit = fit_exponent([0.1, 1, 10], [1, 10, 10])
    half = 12.7062 * math.sqrt((1 / 6) / 1 / 2)
    assert fit.exponent == pytest.approx(0.5)
    assert (fit.low, fit.high) == pytest.approx((0.5 - half, 0.5 + half))


@pytest.mark.full
def test_the_interval_holds_the_truth_in_95_of_100_fits():
    noise = np.random.default_rng(1337)
    x = 2.0 ** np.arange(7, 12)
    hits = 0
    for _ in range(1000):
        fit = fit_exponent(x, x**1.3 * np.exp(0.1 * noise.standard_normal(len(x))))
        hits += fit.low <= 1.3 <= fit.high
    assert 925 <= hits <= 972


def test_a_fit_prints_its_interval_which_two_points_have_not_and_one_has_no_slope():
    assert str(Fit(1.234, 1.1, 1.4, 5)) == "1.23 [1.10, 1.40]"
    fit = fit_exponent([1, 2, 4], [1, 4, math.nan])
    assert fit.exponent == pytest.approx(2) and fit.n == 2
    assert math.isnan(fit.low) and math.isnan(fit.high)
    assert str(fit) == "2.00 (2 points, no interval)"
    assert math.isnan(fit_exponent([4], [7]).exponent)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([1, 2], [1], "one length"),
        ([2, 1], [1, 2], "growing"),
        ([0, 1], [1, 2], "positive"),
        ([1, 2], [1, 0], "y must be positive"),
    ],
)
def test_points_that_have_no_logarithm_or_order_are_refused(x, y, message):
    with pytest.raises(ValueError, match=message):
        fit_exponent(x, y)


def test_a_paired_ratio_agrees_with_a_case_worked_by_hand():
    # Logarithms 0, ln 4: mean ln 2, standard error ln 2, t(1) = 12.706.
    found = paired_ratio([1, 10], [1, 40])
    assert found.value == pytest.approx(2)
    assert (found.low, found.high) == pytest.approx((2**-11.7062, 2**13.7062), rel=1e-3)
    assert str(paired_ratio([2, 20], [3, 30])) == "1.5 [1.5, 1.5]"
    assert str(paired_ratio([2], [3])) == "1.5 (one pair, no interval)"


@pytest.mark.parametrize("pairs", [([], []), ([1, 2], [1]), ([0], [1]), ([1], [math.nan])])
def test_ratios_want_positive_pairs(pairs):
    with pytest.raises(ValueError, match="positive pairs"):
        paired_ratio(*pairs)


def test_a_line_has_its_slope_its_interval_and_its_furthest_point():
    line = fit_line([1, 2, 4], [3, 5, 9])
    assert (line.slope, line.low, line.high, line.at_0) == pytest.approx((2, 2, 2, 1))
    assert line.r2 == pytest.approx(1) and line.worst == pytest.approx(0, abs=1e-12)
    # x = 1, 2, 3 and y = 1, 1, 4: slope 3/2, residuals 1/2, -1, 1/2.
    line = fit_line([1, 2, 3], [1, 1, 4])
    assert line.slope == pytest.approx(1.5) and line.r2 == pytest.approx(0.75)
    assert (line.worst, line.worst_at) == (pytest.approx(-0.5), 2)
    half = 12.7062 * math.sqrt(1.5 / 1 / 2)
    assert (line.low, line.high) == pytest.approx((1.5 - half, 1.5 + half))


def test_two_points_are_no_line():
    with pytest.raises(ValueError, match="three points"):
        fit_line([1, 2], [1, 2])


def test_the_robust_slopes_interval_holds_the_truth_in_95_of_100_draws():
    random, x, held = np.random.default_rng(5), np.arange(40), 0
    for _ in range(400):
        found = robust_slope(x, 0.1 * x + random.standard_t(3, 40))
        held += found.low <= 0.1 <= found.high
    assert 0.92 <= held / 400 <= 0.98


def test_a_jump_and_a_few_peaks_are_no_slope_and_equal_values_have_no_interval():
    x = np.arange(60)
    assert robust_slope(x, np.where(x < 3, 1.0, 9.0)).value == 0.0
    still = robust_slope(x, np.where(x % 10 == 0, 50.0, 7.0))
    assert still.low <= 0 <= still.high and still.value == 0
    assert robust_slope(x, np.full(60, 7.0)) == Slope(0.0, 0.0, 0.0, 60)
    assert robust_slope(x, 0.5 * x) == Slope(0.5, 0.5, 0.5, 60)


def test_what_was_not_measured_is_left_out_and_too_little_has_no_slope():
    assert robust_slope([0, 1, 2, 3], [0.0, np.nan, 2.0, 3.0]) == Slope(1.0, 1.0, 1.0, 3)
    assert math.isnan(robust_slope([0, 1], [0.0, 1.0]).low)
    with pytest.raises(ValueError, match="two lists of one length"):
        robust_slope([1, 2], [0.0, 1.0, 2.0])
