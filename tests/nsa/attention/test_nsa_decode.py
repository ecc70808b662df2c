"""Decoding with a cache: the last rows of the whole operation, however the tokens came."""

from dataclasses import replace

import pytest
import torch
from accuracy import assert_as_accurate
from backend_calls import DEVICE
from cached_cases import Growth, arguments, begun, grown, random_growth, whole
from cases import SMALL, TINY, Case, draw

from nsa.attention import decode, witness
from nsa.attention.decode import nsa_decode
from nsa.reference.nsa import BRANCHES, nsa

BACKENDS = ["reference", "masked", "gather", "prefix", "auto"]


def growth_of(seed: int, backend: str) -> Growth:
    """A random case that the backend takes."""
    growth = random_growth(seed)
    lone = backend == "prefix" and growth.branches == ("cmp",)
    return replace(growth, branches=("cmp", "slc")) if lone else growth


def mismatch(growth: Growth, backend: str, dtype=torch.float64, sunk: bool = False) -> float:
    """The largest error relative to the largest output; under sinks, of which one is none."""
    cache, given = begun(growth, dtype)
    if growth.page is not None:  # any order of the pages
        cache.table.copy_(torch.randperm(cache.shape.pool).view_as(cache.table))
    options = {}
    if sunk:
        options["sinks"] = 2 * torch.randn(given[0].shape[2], 3, dtype=dtype)
        options["sinks"][0, 0] = -torch.inf
    want = whole(*given, growth, **options)
    got = grown(*given, growth, cache, backend, strict=True, **options)
    assert cache.lengths.tolist() == list(growth.lengths)
    error = (got - want).abs().max() / want.abs().max().clamp(min=1)
    return float(error)


def check_random(seeds: range, backend: str, sunk: bool = False) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        error = mismatch(growth_of(seed, backend), backend, sunk=sunk)
        assert error < 1e-12, f"seed {seed}: {random_growth(seed)}: {error}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_growing_in_a_cache_equals_the_whole_at_once(backend):
    check_random(range(30), backend)


@pytest.mark.parametrize("page", [None, 64])
def test_a_prompt_in_chunks_equals_one_pass(page):
    """Chunks that end within, at and behind a block's edge, longer than ring and window."""
    case = Case(257, config=SMALL, phi="mlp", compress_rope=True, value_dim=8)
    given = draw(case)
    for chunks in ((257,), (100, 157), (15, 1, 16, 31, 33, 64, 97)):
        growth = Growth(case, chunks, (257,), page)
        for backend in ("gather", "prefix"):
            cache = growth.cache(torch.float64)
            full = arguments(given, growth, cache)
            got = grown(*full, growth, cache, backend)
            torch.testing.assert_close(got, whole(*full, growth), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["masked", "gather", "prefix"])
def test_low_precision_is_as_accurate_as_plain_torch(backend, dtype):
    """Every block is selected, so that no near-tie decides."""
    case = Case(70, batch=2, config=replace(TINY, select_count=9), phi="linear")
    growth, drawn = Growth(case, (33, 1, 20, 16), (70, 51)), draw(case, dtype)
    cache = growth.cache(dtype)
    given = arguments(drawn, growth, cache)
    got = grown(*given, growth, cache, backend)
    assert got.dtype == dtype
    plain = whole(*given, growth)
    exact = whole(*arguments(drawn.to(torch.float64), growth, cache), growth)
    assert_as_accurate("o", got, plain, exact)


@pytest.mark.parametrize("scale", [-0.4, 0.0, 2.5])
@pytest.mark.parametrize("backend", ["reference", "masked", "gather", "prefix"])
def test_the_scale_may_have_any_sign(backend, scale):
    growth = Growth(Case(30), (9, 21), (30,))
    cache, given = begun(growth)
    got = grown(*given, growth, cache, backend, scale=scale)
    torch.testing.assert_close(got, whole(*given, growth, scale=scale), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_take_their_share_of_what_grows_in_a_cache(backend):
    check_random(range(500, 520), backend, sunk=True)


@pytest.mark.full
@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("branches", [BRANCHES, ("cmp",), ("win",), ("slc", "win")], ids="+".join)
def test_the_kernels_give_sinks_their_share_in_one_program_or_several(
    branches, splits, monkeypatch
):
    from nsa.kernels import decode as kernels

    plain = kernels.tuning
    cut = dict.fromkeys(("score_splits", "selected_splits", "window_splits"), splits)
    monkeypatch.setattr(kernels, "tuning", lambda call: plain(call)._replace(**cut))
    growth = Growth(Case(28, kv_heads=1, group=3), (16, 12), (28,), branches=branches)
    assert mismatch(growth, "triton", torch.float32, sunk=True) < 5e-6


def test_who_served_is_told():
    growth = Growth(Case(40), (20, 1, 19), (40,))
    cache, given = begun(growth, torch.float32)
    with witness.recording() as seen:
        grown(*given, growth, cache, "auto")
    served = ("decode-forward", "decode-gather", "decode-prefix")
    assert [seen.backends[name] for name in served] == [1, 1, 1]
    assert seen.paths["slc", "cached-gather"] == 1
    assert any(name == "triton" and "without a GPU" in why for name, why in seen.declined)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted; a GPU has the test below")
def test_the_kernels_grow_a_cache_as_torch_does():
    case = Case(27, batch=2, phi="mlp", compress_rope=True)
    growth = Growth(case, (16, 1, 10), (27, 19), page=8)
    assert mismatch(growth, "triton", torch.float32) < 5e-6


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "gather", "masked"])
@pytest.mark.parametrize("page", [None, 64])
def test_a_step_is_a_cuda_graph_whatever_the_lengths(backend, page):
    """One capture, replayed while sequences of other lengths grow, equals the whole at once."""
    case = Case(150, batch=3, dim=32, value_dim=32, config=SMALL)
    growth = Growth(case, (100, *[1] * 50), (150, 150, 150), page)
    cache = growth.cache(torch.float32, "cuda")
    drawn = draw(case, torch.float32, "cuda")
    q, k, v, gates, phi = arguments(drawn, growth, cache)
    counts = torch.tensor([100, 37, 64], dtype=torch.int32, device="cuda")
    rows = torch.arange(3, device="cuda")
    want = nsa(q, k, v, gates, case.config, phi=phi).o.detach()

    def at(x, t):
        return {b: at(y, t) for b, y in x.items()} if isinstance(x, dict) else x[rows, t][:, None]

    def held(x):
        return {b: held(y) for b, y in x.items()} if isinstance(x, dict) else x[:, :100]

    nsa_decode(*(held(x) for x in (q, k, v, gates)), cache, phi=phi, counts=counts)
    fixed = [at(x, counts.long()) for x in (q, k, v, gates)]

    def fill(t):
        for to, x in zip(fixed, (at(x, t) for x in (q, k, v, gates)), strict=True):
            pairs = [(to, x)] if torch.is_tensor(to) else [(to[b], x[b]) for b in to]
            for there, new in pairs:
                there.copy_(new)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        nsa_decode(*fixed, cache, phi=phi, backend=backend, advance=False)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = nsa_decode(*fixed, cache, phi=phi, backend=backend)
    for _ in range(50):
        t = cache.lengths.long()
        fill(t)
        cache.places.room(1)
        graph.replay()
        cache.places.count(1)
        torch.testing.assert_close(o, at(want, t), rtol=1e-3, atol=1e-3)
    assert cache.lengths.tolist() == [150, 87, 114]


def test_the_backends_are_those_that_are_tested():
    assert decode.names() == ["triton", "forward", "prefix", "gather", "masked", "reference"]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["reference", "gather"])
def test_ten_thousand_random_cases_equal_the_whole(backend):
    check_random(range(10_000, 20_000), backend)
