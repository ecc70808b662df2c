"""The decode kernels against the definition: what a step writes and what it attends to."""

import pytest
import torch
from accuracy import assert_as_accurate
from backend_calls import DEVICE
from cases import TINY
from decode_inputs import Step, after, draw, on_cache, whole

from nsa.kernels.decode import decode
from nsa.kernels.decode_common import Tuning

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

CUT = Tuning(
    score_rows=16, score_keys=16, score_splits=3, score_warps=4, score_stages=1, choose_blocks=8,
    choose_warps=4, attend_keys=16, selected_splits=3, window_splits=2, attend_warps=4,
    attend_stages=1, dependent=False,
)  # fmt: skip
WHOLE = CUT._replace(score_splits=1, selected_splits=1, window_splits=1)


def check(step: Step, tuned: Tuning | None = CUT) -> None:
    cache = draw(step, DEVICE)
    args, kwargs = cache.arguments()
    o = decode(*args, **kwargs, tuned=tuned)
    for name, want in after(cache).items():
        if want is not None and want.is_floating_point():
            written(name, cache.tensors[name], want, step.dtype)
    assert o.dtype == step.dtype
    if step.dtype == torch.float32:
        torch.testing.assert_close(o.double(), whole(cache), atol=2e-5, rtol=0)
    exact = on_cache(cache, cache.tensors, torch.float64)
    assert_as_accurate("o", o, on_cache(cache, cache.tensors, step.dtype), exact)


def written(name, got, want, dtype):
    """Rows are kept bit by bit, compressed ones to a rounding; where nothing is known, anything."""
    known = ~want.isnan()
    if name.endswith("cmp"):
        error = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(got[known], want[known], rtol=error, atol=error, msg=name)
        assert got[~known].isnan().all(), f"{name}: a row that is not complete was written"
    else:
        assert torch.equal(got[known], want[known]), name


@pytest.mark.parametrize("tuned", [CUT, WHOLE], ids=["cut", "whole"])
@pytest.mark.parametrize("page", [None, 16])
def test_sequences_of_other_lengths_side_by_side(page, tuned):
    check(Step((0, 37, 3, 70), TINY, kv_heads=2, page=page), tuned)
