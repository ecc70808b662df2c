"""Decoding with a cache: the last rows of the whole operation, however the tokens came."""

import pytest
import torch
from cached_cases import arguments, grown, random_growth, whole
from cases import draw

from nsa.attention import decode

BACKENDS = ["reference", "masked", "gather", "auto"]


def mismatch(seed: int, backend: str) -> float:
    """The largest error of a random case in fp64, relative to the largest output."""
    growth = random_growth(seed)
    torch.manual_seed(seed)
    cache = growth.cache(torch.float64)
    if growth.page is not None:  # any order of the pages
        cache.table.copy_(torch.randperm(cache.shape.pool).view_as(cache.table))
    given = arguments(draw(growth.case), growth, cache)
    want = whole(*given, growth)
    got = grown(*given, growth, cache, backend, strict=True)
    assert cache.lengths.tolist() == list(growth.lengths)
    error = (got - want).abs().max() / want.abs().max().clamp(min=1)
    return float(error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_growing_in_a_cache_equals_the_whole_at_once(backend):
    for seed in range(60):
        error = mismatch(seed, backend)
        assert error < 1e-12, f"seed {seed}: {random_growth(seed)}: {error}"


def test_the_backends_are_those_that_are_tested():
    assert decode.names() == ["triton", "forward", "gather", "masked", "reference"]


@pytest.mark.slow
def test_four_hundred_random_cases_equal_the_whole():
    for seed in range(1000, 1400):
        backend = BACKENDS[seed % len(BACKENDS)]
        error = mismatch(seed, backend)
        assert error < 1e-12, f"{backend}, seed {seed}: {random_growth(seed)}: {error}"


@pytest.mark.long
@pytest.mark.parametrize("backend", ["reference", "gather"])
def test_ten_thousand_random_cases_equal_the_whole(backend):
    for seed in range(10_000, 20_000):
        error = mismatch(seed, backend)
        assert error < 1e-12, f"seed {seed}: {random_growth(seed)}: {error}"
