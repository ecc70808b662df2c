"""Sequences of one cache: each as if alone, cropped, reordered, selected, saved and reset."""

import pytest
import torch
from model_caches import EXACT, assert_as_alone, cache_of, continued, joined, model_of, ragged
from tiny_models import tiny, tokens

from nsa.model.cache import NSACache


@pytest.mark.parametrize("page", [None, 16])
def test_sequences_of_different_lengths_are_each_as_if_alone(page):
    model, lengths = model_of(tiny(phi="linear", compress_rope="after")), [40, 3, 17, 24]
    ids, new = tokens(4, 40), tokens(4, 12, seed=1)
    cache, first = ragged(model, ids, lengths, page=page)
    later = continued(model, cache, new, [1, 1, 3, 7])
    both = [torch.cat([a[:n], b]) for a, b, n in zip(first, later, lengths, strict=True)]
    assert_as_alone(model, both, joined(ids, lengths, new))


@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("shared_kv", [False, True])
def test_a_draft_that_is_cropped_leaves_no_trace(page, shared_kv):
    """Speculative decoding: six tokens are tried, and some of them stay."""
    model = model_of(tiny(phi="linear", shared_kv=shared_kv))
    ids, wrong = tokens(2, 44), tokens(2, 6, seed=9)
    cache = cache_of(model, 2, page=page)
    model(ids[:, :20], cache=cache)
    length = [20, 20]
    for kept in ([0, 0], [3, 1], [6, 0], [2, 5], [0, 6], [5, 6]):
        draft = wrong.clone()
        for row, count in enumerate(kept):
            draft[row, :count] = ids[row, length[row] : length[row] + count]
        model(draft, cache=cache)
        length = [held + count for held, count in zip(length, kept, strict=True)]
        cache.crop(length)
        assert cache.lengths.tolist() == cache.places.held == length
    rest = torch.stack([ids[row, length[row] :][:4] for row in (0, 1)])
    assert_as_alone(model, model(rest, cache=cache)[0], joined(ids, length, rest))


@pytest.mark.parametrize("page", [None, 8])
def test_sequences_change_places_as_beams_do(page):
    model, lengths = model_of(tiny(phi="linear")), [33, 18, 25]
    ids = joined(tokens(3, 33), lengths, tokens(3, 0))
    cache, _ = ragged(model, tokens(3, 33), lengths, page=page)
    for step, index in enumerate([[1, 1, 0], [0, 0, 2], [2, 1, 0], [0, 1, 2], [1, 1, 1]]):
        cache.reorder(index)
        new = tokens(3, 3, seed=step + 1)
        ids = [torch.cat([ids[source], row]) for source, row in zip(index, new, strict=True)]
        assert_as_alone(model, continued(model, cache, new, [2, 1]), ids)


def test_beams_share_the_pages_that_are_complete():
    model = model_of(tiny(layers=1))
    cache = cache_of(model, 4, 48, page=8, pages=14)
    model(tokens(4, 40), cache=cache, counts=[40, 0, 0, 0])
    cache.reorder([0, 0, 0, 0])
    # Of 40 tokens the newest l - 1 = 3 are not all compressed yet, so the fifth page is each one's.
    assert cache.pages.shared and cache.pages.free == 14 - 4 - 4
    assert len({own[4] for own in cache.pages.of}) == 4
    first = tokens(4, 40)[:1].expand(4, -1)
    for length, new in ((40, tokens(4, 5, seed=1)), (30, tokens(4, 9, seed=2))):
        if length < 40:  # into pages that are shared
            cache.crop(length)
        found = continued(model, cache, new, [1])
        assert_as_alone(model, found, joined(first, [length] * 4, new))


@pytest.mark.parametrize("capacity", [None, 200])
@pytest.mark.parametrize("page", [None, 8])
def test_a_part_of_a_cache_goes_on_by_itself_and_may_be_larger(page, capacity):
    model, lengths = model_of(tiny()), [33, 18, 25]
    cache, _ = ragged(model, tokens(3, 33), lengths, page=page)
    part = cache.select([2, 0, 2], capacity)
    assert part.lengths.tolist() == [25, 33, 25]
    assert part.shape.capacity == (capacity or cache.shape.capacity)
    with pytest.raises(ValueError, match="the cache is full: sequence 0 has 0 of 16 tokens"):
        cache.select([1], 16)
    new = tokens(3, 4, seed=1)
    found, again = model(new, cache=part)[0], model(new[[1, 2, 0]], cache=cache)[0]
    torch.testing.assert_close(found[1], again[0], **EXACT)
    assert_as_alone(model, found, joined(tokens(3, 33)[[2, 0, 2]], [25, 33, 25], new))
    assert cache.lengths.tolist() == [37, 22, 29]


@pytest.mark.parametrize("page", [None, 8])
def test_a_cache_that_was_saved_goes_on_bit_by_bit(tmp_path, page):
    model = model_of(tiny(phi="mlp"))
    cache, _ = ragged(model, tokens(2, 33), [33, 18], page=page, backend="masked")
    model(tokens(2, 2), cache=cache)
    cache.save(tmp_path / "cache.pt")
    again = NSACache.load(tmp_path / "cache.pt")
    assert again.record() == cache.record() and again.backend == "masked"
    new = tokens(2, 6, seed=1)
    one, two = (continued(model, x, new, [1, 5]) for x in (cache, again))
    assert torch.equal(one, two)
    (tmp_path / "other.pt").write_bytes((tmp_path / "cache.pt").read_bytes()[:3000])
    with pytest.raises(ValueError, match="truncated or no checkpoint"):
        NSACache.load(tmp_path / "other.pt")


def test_a_reset_sequence_begins_anew_and_frees_its_pages():
    model = model_of(tiny())
    cache = cache_of(model, 2, 40, page=8, pages=8)
    ids = tokens(2, 24)
    model(ids, cache=cache)
    with pytest.raises(ValueError, match=r"the cache is full: 4 more pages of 8 tokens .* 2 of 8"):
        model(tokens(2, 16), cache=cache)
    assert cache.lengths.tolist() == [24, 24] and cache.pages.free == 2
    cache.reset([1])
    assert cache.pages.free == 5 and cache.lengths.tolist() == [24, 0]
    new = tokens(2, 16, seed=1)
    assert_as_alone(model, model(new, cache=cache)[0], joined(ids, [24, 0], new))
    cache.reset()
    assert cache.longest == 0 and cache.pages.free == 8


@pytest.mark.parametrize("page", [None, 8])
def test_what_the_rings_have_forgotten_cannot_be_cropped_to(page):
    model = model_of(tiny())
    cache = cache_of(model, 2, page=page)
    model(tokens(2), cache=cache)
    with pytest.raises(ValueError, match="has held 48 tokens, so its rings go back to 32"):
        cache.crop(9)
    assert cache.lengths.tolist() == cache.places.held == [48, 48]
    cache.crop(32)
    new = tokens(2, 9, seed=1)
    assert_as_alone(model, model(new, cache=cache)[0], joined(tokens(2), [32, 32], new))
