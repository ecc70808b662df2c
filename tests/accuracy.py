"""The one tolerance: a backend may stray twice as far from the truth as plain torch does."""

import torch
from torch import Tensor


def assert_as_accurate(
    name: str,
    got: Tensor,
    same_dtype: Tensor,
    exact: Tensor,
    slack: float = 2.0,
    magnitude: float = 0.0,
) -> None:
    """Holds `got` to the accuracy rule of the definition, in its worst and in its mean error.

    same_dtype: the reference in got's dtype, on the same inputs; its error is the measuring stick.
    exact: the reference in float64. A quarter of the dtype's epsilon, relative to the largest (or
    mean) exact value, is granted on top, for results that plain torch happens to get exactly right;
    and four fp32 epsilons of the largest value or of `magnitude`, the size of terms that cancel on
    the way to this result: statistics are fp32 in every dtype.
    A result that is exactly 0 because its terms cancel is held to four of the dtype's epsilons.
    """
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(exact.shape)}"
    assert got.isfinite().all(), f"{name}: {int((~got.isfinite()).sum())} values are not finite"
    ours, torchs = ((x.double() - exact).abs() for x in (got, same_dtype))
    grain = torch.finfo(same_dtype.dtype).eps / 4
    size = exact.abs()
    cancels = size.max() < 1e-9 * magnitude
    statistics = torch.promote_types(same_dtype.dtype, torch.float32)
    noise = 4 * (4 * grain if cancels else torch.finfo(statistics).eps) * max(magnitude, size.max())
    for kind, error, stick, scale in (
        ("worst", ours.max(), torchs.max(), size.max()),
        ("mean", ours.mean(), torchs.mean(), size.mean()),
    ):
        limit = slack * stick + grain * scale + noise
        assert error <= limit, (
            f"{name}: {kind} error {error:.2e} > {limit:.2e} "
            f"(torch in {same_dtype.dtype}: {stick:.2e})"
        )
