"""A layer's cache: its bytes, what may be done to it, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from cached_cases import Growth, begun, random_growth, unchanged, whole
from cases import TINY, Case

from nsa.attention.cache import LayerCache
from nsa.attention.decode import nsa_decode
from nsa.attention.places import CacheShape, Places
from nsa.config import NSAConfig
from nsa.reference.nsa import BRANCHES

CASE = Case(40, batch=3, dim=8, value_dim=4, config=TINY)
GROWTH = Growth(CASE, (17, 3, 20), (40, 33, 40))


def part(given, rows, index=slice(None)):
    """q, k, v, gates of some sequences and tokens, and phi as it is."""
    q, k, v, gates, phi = given
    k, v = ({b: x[index, rows] for b, x in side.items()} for side in (k, v))
    return q[index, rows], k, v, gates[index, rows], phi


def step(given, cache, rows, **options):
    q, k, v, gates, phi = part(given, rows)
    return nsa_decode(q, k, v, gates, cache, phi=phi, **{"backend": "gather"} | options)


def test_the_bytes_of_the_papers_sizes_are_those_of_its_tensors():
    """Keys and values of 64k tokens, a sixteenth of them compressed, and two short rings."""
    shape = CacheShape(NSAConfig(), 1, 65536, 4, 128, 128)
    tokens = 65536 + 65536 // 16 + (512 + 16) + (32 + 16)
    assert shape.bytes == 2 * 4 * 128 * 2 * (tokens + 4)  # each tensor with its row of zeros
    assert shape.window_ring == 528 and shape.raw_ring == 48


def test_a_capacity_is_rounded_up_to_whole_pages():
    assert CacheShape(TINY, 2, 33, 1, 8, 8).capacity == 40
    shape = CacheShape(TINY, 2, 33, 1, 8, 8, page=24)
    assert (shape.capacity, shape.pages_each, shape.pool) == (48, 2, 4)


@pytest.mark.parametrize("chunks", [(40,), (20, 20), (33, 7)])
def test_a_ring_holds_its_newest_tokens_each_at_its_position(chunks):
    shape = CacheShape(TINY, 1, 40, 1, 1, 1, dtype=torch.float64)
    cache, start = LayerCache(shape), 0
    token = torch.arange(40, dtype=torch.float64).view(1, 40, 1, 1)
    for chunk in chunks:
        cache.append(*[token[:, start : start + chunk]] * 2)
        start += chunk
    for name in ("k_win", "v_win", "k_raw", "v_raw"):
        ring = cache.tensors[name]
        newest = range(40 - ring.shape[1], 40)
        assert newest[0] > 0
        assert [int(ring[0, t % len(newest), 0, 0]) for t in newest] == [*newest]


@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("backend", ["reference", "masked", "gather"])
def test_what_is_cropped_back_was_never_there(backend, page):
    """A draft of NaN before every chunk, then back: nothing of it is ever read."""
    growth = replace(GROWTH, chunks=(1, 7, 1, 16, 15), page=page, capacity=64)
    cache, given = begun(growth)
    lengths, start, parts = torch.tensor(growth.lengths), 0, []
    for chunk, drafted in zip(growth.chunks, (16, 1, 9, 16, 2), strict=True):
        held = cache.lengths.tolist()
        wrong = [torch.full_like(x, torch.nan) for x in part(given, slice(0, drafted))[1].values()]
        cache.append(
            dict(zip(BRANCHES, wrong, strict=True)),
            {b: x[..., :4] for b, x in zip(BRANCHES, wrong, strict=True)},
        )
        cache.crop(held)
        counts = (lengths - start).clamp(0, chunk).int()
        parts.append(
            step(given, cache, slice(start, start + chunk), counts=counts, backend=backend)
        )
        start += chunk
    got, want = torch.cat(parts, 1), whole(*given, growth)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_a_crop_that_the_rings_do_not_hold_is_refused_and_changes_nothing():
    cache, given = begun(GROWTH)
    step(given, cache, slice(0, 40))
    for call, message in (
        (lambda: cache.crop(41), "sequence 0 holds 40 tokens and cannot be cropped to 41"),
        (lambda: cache.crop([40, 40, -1]), "sequence 2 holds 40 .* to -1"),
        (lambda: cache.crop([40, 10, 40]), "1 has held 40 tokens, .* back to 24 .* 10 is overwr"),
        (lambda: cache.crop([1, 2]), r"one length or 3.*shape \(2,\)"),
        (lambda: cache.advance(-1), "cannot advance by -1"),
    ):
        with unchanged(cache), pytest.raises(ValueError, match=message):
            call()
    cache.crop([40, 24, 0])
    assert cache.lengths.tolist() == [40, 24, 0]


def test_every_crop_within_the_slack_can_be_grown_again():
    """A crop that passes is enough: after it, the same tokens give the same outputs."""
    for held in (1, 5, 16, 17, 24, 33, 40):
        for keep in range(max(0, held - 16), held, 3):
            check_regrown(held, keep)


def check_regrown(held, keep, growth=replace(GROWTH, case=replace(CASE, batch=1))):  # noqa: B008
    torch.manual_seed(0)
    cache, given = begun(growth)
    first = step(given, cache, slice(0, held))
    cache.crop(keep)
    again = step(given, cache, slice(keep, held))
    assert torch.equal(torch.isfinite(again), torch.ones_like(again, dtype=torch.bool))
    torch.testing.assert_close(again, first[:, keep:], rtol=0, atol=1e-12)


def test_a_crop_goes_back_as_far_as_the_windows_ring_and_no_further():
    """A ring of 32 holds tokens from 8 on, of 40: all that a window of 16 shows to token 23."""
    case = replace(CASE, batch=1, config=replace(TINY, window=16))
    growth = replace(GROWTH, case=case, lengths=(40,))
    check_regrown(40, 23, growth)
    with pytest.raises(ValueError, match="sequence 0 has held 40 tokens"):
        check_regrown(40, 22, growth)


@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("backend", ["reference", "masked", "gather"])
def test_a_sequence_that_was_reset_begins_anew_whatever_was_there(backend, page):
    growth = replace(GROWTH, lengths=(40, 40, 40), page=page)
    cache, given = begun(growth)
    q, k, v, gates, phi = part(given, slice(0, 20))
    bad = [{b: x.clone() for b, x in side.items()} for side in (k, v)]
    for side in bad:
        for x in side.values():
            x[1] = torch.nan
    nsa_decode(q, *bad, gates, cache, phi=phi, backend=backend)
    cache.reset([1])
    assert cache.lengths.tolist() == [20, 0, 20]
    q, k, v, gates = (x[1:2].expand(3, -1, -1, -1) if torch.is_tensor(x) else
                      {b: y[1:2].expand(3, -1, -1, -1) for b, y in x.items()}
                      for x in (q, k, v, gates))  # fmt: skip
    # First four: what was there lies behind them, before the ends of the others.
    given_anew, parts = (q, k, v, gates, phi), []
    for rows in (slice(0, 4), slice(4, 20)):
        parts.append(step(given_anew, cache, rows, backend=backend))
    got = torch.cat(parts, 1)
    torch.testing.assert_close(got[1], whole(*given, growth)[1, :20], rtol=0, atol=1e-12)
    cache.reset()
    assert cache.longest == 0 and cache.lengths.tolist() == [0, 0, 0]


def test_pages_come_when_they_are_needed():
    growth = replace(GROWTH, lengths=(40, 40, 40), page=8)
    cache, given = begun(growth, pages=14)
    assert (cache.table == -1).all()
    with pytest.raises(ValueError, match=r"sequence 0 needs 1 pages and its table begins \[-1\]"):
        step(given, cache, slice(0, 5), strict=True)
    free, parts = list(range(13, -1, -1)), []
    for start in range(0, 32, 4):
        if start % 8 == 0:
            for b in range(3):
                cache.table[b, start // 8] = free.pop()
        parts.append(step(given, cache, slice(start, start + 4), strict=True))
    got = torch.cat(parts, 1)
    torch.testing.assert_close(got, whole(*given, growth)[:, :32], rtol=0, atol=1e-12)
    cache.table[0, 4] = cache.table[1, 4] = free.pop()
    cache.table[2, 4] = free.pop()
    with pytest.raises(ValueError, match="page 12 of sequence 0 is held twice"):
        step(given, cache, slice(32, 36), strict=True)


@pytest.mark.parametrize("backend", ["reference", "masked", "gather"])
@pytest.mark.parametrize("wrong", [-7, 15, 2**31 - 1])
def test_a_page_out_of_range_is_named_in_strict_mode_and_never_read_or_written(backend, wrong):
    growth = replace(GROWTH, lengths=(40, 40, 40), page=8)
    cache, given = begun(growth)
    step(given, cache, slice(0, 20))
    cache.table[1, 1] = wrong
    with pytest.raises(ValueError, match=rf"pages from .*{wrong if wrong > 0 else -7}.*0..14"):
        step(given, cache, slice(20, 23), strict=True, advance=False)
    want = whole(*given, growth)[:, 20:23]
    o = step(given, cache, slice(20, 23), backend=backend)
    assert o.isfinite().all()
    torch.testing.assert_close(o[[0, 2]], want[[0, 2]], rtol=0, atol=1e-12)
    cache.table[1, 2] = wrong  # where it would write next
    others = cache.tensors["k_slc"].clone()
    step(given, cache, slice(23, 24), backend=backend)
    changed = (cache.tensors["k_slc"] != others).flatten(1).any(1).nonzero().flatten()
    assert changed.tolist() == [2, 12]  # pages 5 b + 2 of sequences 0 and 2


@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("lengths", [(-9, 20, 20), (20, 10**6, 20)])
def test_lengths_out_of_range_are_named_in_strict_mode_and_reach_nothing(lengths, page):
    growth = replace(GROWTH, lengths=(40, 40, 40), page=page)
    cache, given = begun(growth)
    step(given, cache, slice(0, 20))
    cache.lengths.copy_(torch.tensor(lengths))
    with pytest.raises(ValueError, match=r"lengths\[[01]\]=(-9|1000000) is outside 0..20"):
        step(given, cache, slice(20, 23), strict=True)
    for backend in ("masked", "gather"):
        o = step(given, cache, slice(20, 23), backend=backend, advance=False)
        torch.testing.assert_close(o[2], whole(*given, growth)[2, 20:23], rtol=0, atol=1e-12)


def test_lengths_that_run_backwards_behind_the_caches_back_are_named_in_strict_mode():
    cache, given = begun(GROWTH)
    step(given, cache, slice(0, 40))
    cache.lengths[1] = 3
    cache.places.held = [3] * 3
    with pytest.raises(ValueError, match=r"lengths\[1\]=3 runs backwards: 40 tokens"):
        nsa_decode(*part(given, slice(0, 1))[:4], cache, strict=True)


def test_a_full_cache_is_refused_with_what_would_do_and_nothing_is_overwritten():
    cache, given = begun(GROWTH)
    step(given, cache, slice(0, 38))
    full = pytest.raises(ValueError, match=r"0 has 38 of 40 tokens and 3 more .* capacity=41")
    with unchanged(cache), full:
        step(given, cache, slice(0, 3))
    with unchanged(cache), full:
        cache.append(*part(given, slice(0, 3))[1:3])
    none_more = torch.tensor([2, 0, 1], dtype=torch.int32)
    step(given, cache, slice(0, 3), counts=none_more)  # these do fit
    assert cache.lengths.tolist() == [40, 38, 39]


@pytest.mark.parametrize("backend", ["reference", "masked", "gather"])
def test_the_longest_sequence_says_what_is_read_and_whether_more_fit(backend):
    """A bound of the host that was too high is lowered to no less than any length."""
    growth = replace(GROWTH, lengths=(40, 40, 40))
    cache, given = begun(growth)
    step(given, cache, slice(0, 36), counts=torch.tensor([12, 36, 0], dtype=torch.int32))
    cache.places.held = [40] * 3  # as if others had been stored and forgotten
    held = torch.tensor([12, 36, 0])
    q, k, v, gates, phi = given
    ahead = torch.arange(3)[:, None], held[:, None] + torch.arange(4)
    k, v = ({b: x[ahead] for b, x in side.items()} for side in (k, v))
    got = nsa_decode(q[ahead], k, v, gates[ahead], cache, phi=phi, backend=backend)
    torch.testing.assert_close(got, whole(*given, growth)[ahead], rtol=0, atol=1e-12)
    assert cache.longest == 40 and cache.lengths.tolist() == [16, 40, 4]
    with pytest.raises(ValueError, match="1 has 40 of 40 tokens and 1 more"):
        step(given, cache, slice(0, 1))


def test_no_tokens_and_no_sequences_are_refused():
    cache, given = begun(GROWTH)
    _, k, v, _, phi = part(given, slice(0, 0))
    with pytest.raises(ValueError, match=r"with N of at least 1, got \(3, 0, 2, 8\)"):
        cache.append(k, v, phi)
    for rows in ([], [[0]], [3], [-1]):
        with pytest.raises(ValueError, match=r"rows must be a list of sequences out of 0..2, got"):
            cache.reset(rows)


def test_the_hosts_bound_is_looked_up_before_a_cache_is_called_full():
    cache, given = begun(GROWTH)
    one = torch.ones(3, dtype=torch.int32)
    for _ in range(20):
        step(given, cache, slice(0, 4), counts=one)
    assert cache.lengths.tolist() == [20, 20, 20] and cache.longest <= 40


def test_layers_that_share_places_advance_together():
    cache, given = begun(GROWTH)
    shape, places = cache.shape, Places(cache.shape)
    layers = [LayerCache(shape, places=places) for _ in range(2)]
    want, parts = whole(*given, replace(GROWTH, lengths=(40, 40, 40))), []
    for start in (0, 20):
        outputs = [step(given, c, slice(start, start + 20), advance=False) for c in layers]
        places.advance(20)
        assert torch.equal(*outputs)
        parts.append(outputs[0])
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="must have one shape"):
        LayerCache(replace(shape, batch=2), places=places)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 0}, "capacity=0 must be an int of at least 1"),
        ({"batch": 2.0}, "batch=2.0 must be an int"),
        ({"page": 12}, "page=12 is not a multiple of select_block=8; nearest that are: 8 and 16"),
        ({"page": 3}, "nearest that are: 8$"),
        ({"pages": 4}, "pages=4 needs a page size; page=8 would do"),
        ({"dtype": torch.int8}, "dtype=torch.int8 is no dtype of a cache"),
        ({"branches": ("win", "dense")}, "choose at least one of"),
        ({"config": None}, "config must be an NSAConfig, got a NoneType"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CacheShape(TINY, 2, 40, 1, 8, 8), **changes)


def test_a_stored_shape_is_restored_and_one_of_other_fields_is_refused():
    shape = CacheShape(TINY, 2, 40, 1, 8, 8, page=8)
    assert CacheShape.from_dict(shape.to_dict()) == shape
    with pytest.raises(ValueError, match="unknown or missing: batches"):
        CacheShape.from_dict(shape.to_dict() | {"batches": 1})


def test_random_cases_with_shared_pages_reach_every_layout():
    """The random cases are no proof of what they never draw."""
    growths = [random_growth(seed) for seed in range(400)]
    assert {g.case.phi for g in growths} == {"mean", "linear", "mlp"}
    assert any(g.page and g.shared and "win" in g.branches for g in growths)
    assert any(g.case.compress_rope and g.page for g in growths)
    assert any(max(g.chunks) > 16 + g.case.config.window for g in growths)
    assert any(0 in g.lengths and len(set(g.lengths)) > 1 for g in growths)
    assert {g.branches for g in growths} >= {BRANCHES, ("cmp",), ("slc",), ("win",)}
