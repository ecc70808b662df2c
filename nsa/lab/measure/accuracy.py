"""The accuracy rule: an implementation may stray twice as far from the truth as plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor


class AccuracyError(Exception):
    """An implementation is not accurate; the message says where and by how much."""


@dataclass(frozen=True)
class Error:
    """The worst element's error and what was allowed, both relative to the largest exact value."""

    name: str
    worst: float
    limit: float


def hold(
    name: str,
    got: Tensor,
    same_dtype: Tensor,
    exact: Tensor,
    *,
    dtype: torch.dtype,
    slack: float = 2.0,
    magnitude: float = 0.0,
) -> Error:
    """Holds `got` to the rule in its worst and its mean error; AccuracyError where it breaks it.

    same_dtype: the definition evaluated in `dtype` by plain torch, whose error is the measuring
    stick; exact: it in fp64. A quarter of the dtype's epsilon, relative to the largest (or mean)
    exact value, comes on top, and four fp32 epsilons of the largest value or of `magnitude`, the
    size of terms that cancel on the way: statistics are fp32 in every dtype. A result that is
    exactly 0 because its terms cancel is held to four of the dtype's epsilons of `magnitude`.

    One draw of roundings against another: of 15,840 tensors in bf16 at T 33 and DV 256, 2 missed
    it, with 2.35 times torch's error, a twentieth of an epsilon of the call's largest gradient.
    """
    got, same_dtype, exact = (x.detach() for x in (got, same_dtype, exact))
    magnitude = float(magnitude)
    bad = int((~got.isfinite()).sum())
    if bad:
        raise AccuracyError(f"{name}: {bad} values are not finite, of {got.numel()}")
    ours, torchs = ((x.double() - exact).abs() for x in (got, same_dtype))
    size = exact.abs()
    largest = float(size.max())
    grain = torch.finfo(dtype).eps / 4
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    noise = 4 * (4 * grain if largest < 1e-9 * magnitude else wide) * max(magnitude, largest)
    found = {}
    for kind, error, stick, scale in (
        ("worst", ours.max(), torchs.max(), largest),
        ("mean", ours.mean(), torchs.mean(), float(size.mean())),
    ):
        limit = slack * float(stick) + grain * scale + noise
        if not float(error) <= limit:
            raise AccuracyError(
                f"{name}: {kind} error {float(error):.2e} > {limit:.2e} "
                f"(plain torch in {str(dtype).removeprefix('torch.')}: {float(stick):.2e})"
            )
        found[kind] = (float(error), limit)
    scale = largest or 1.0
    return Error(name, found["worst"][0] / scale, found["worst"][1] / scale)
