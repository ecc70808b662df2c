import pytest
import torch

from nsa.model.pages import Pages


def pages_of(batch=3, each=4, page=8, pages=8):
    return Pages(torch.zeros(batch, each, dtype=torch.int32), page, pages)


def check(pages):
    """The table is what the host knows, and users are counted right."""
    rows = [[page for page in row if page >= 0] for row in pages.table.tolist()]
    assert rows == pages.of
    every = [page for own in rows for page in own]
    assert pages.users == [every.count(page) for page in range(pages.pages)]


def test_a_sequence_grows_by_pages_of_its_own_and_gives_them_back():
    pages = pages_of()
    assert pages.table.eq(-1).all() and pages.free == 8
    pages.reserve([1, 8, 9])
    assert [len(own) for own in pages.of] == [1, 1, 2] and pages.free == 4
    before = [list(own) for own in pages.of]
    pages.reserve([8, 9, 3])  # a shorter one keeps what it has
    assert [len(own) for own in pages.of] == [1, 2, 2]
    assert [now[: len(then)] for now, then in zip(pages.of, before, strict=True)] == before
    assert not pages.shared
    check(pages)
    pages.release(1)
    assert [len(own) for own in pages.of] == [1, 0, 2] and pages.free == 5
    check(pages)


def test_a_pool_that_is_too_small_gives_nobody_anything():
    pages = pages_of(pages=4)
    pages.reserve([8, 8, 0])
    with pytest.raises(ValueError, match="3 more pages of 8 tokens are needed and 2 of 4 are free"):
        pages.reserve([16, 16, 1])
    assert [len(own) for own in pages.of] == [1, 1, 0]
    pages.release(1)
    pages.reserve([16, 0, 0])
    with pytest.raises(ValueError, match="needs 4 more pages of 8 tokens") as raised:
        pages.reorder([0, 0, 0], [16, 16, 16], 16)
    assert "2 of 4 are free" in str(raised.value) and len(pages.of[0]) == 2
    check(pages)


def test_complete_pages_are_shared_and_others_copied():
    pages = pages_of(each=8, pages=12)
    pages.reserve([30, 10, 0])
    first, second, third, fourth = pages.of[0]
    # 30 tokens, of which the newest 7 are not done with: from token 23 on, in the third page
    sources, targets = pages.reorder([0, 1, 0], [30, 10, 30], 7)
    assert sources == [third, fourth] and pages.of[0] == [first, second, third, fourth]
    assert pages.of[2] == [first, second, *targets] and pages.shared
    assert set(targets).isdisjoint({first, second, third, fourth, *pages.of[1]})
    check(pages)
    # Back to 12 tokens: who will write into shared pages has copies.
    sources, targets = pages.reorder([0, 1, 2], [12, 10, 12], 7)
    assert sources == [first, second] and not pages.shared
    assert pages.of[0] == [first, second] and pages.of[2] == targets
    check(pages)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_what_is_written_to_is_nobody_elses(seed):
    """Each token is a number; pages are written, shared and copied as a cache does."""
    random = torch.Generator().manual_seed(seed)

    def draw(high):
        return int(torch.randint(high, (1,), generator=random))

    pages, back, batch = pages_of(batch=4, each=6, page=4, pages=20), 3, 4
    pool, rows, number = torch.full((20, 4), -1), [[] for _ in range(batch)], 0
    for _ in range(40):
        what = draw(3)
        if what == 0:  # grow
            more = [draw(6) for _ in range(batch)]
            wanted = [len(row) + n for row, n in zip(rows, more, strict=True)]
            if max(wanted) > 24:
                rows[draw(batch)].clear()
                pages.of = [own if row else [] for own, row in zip(pages.of, rows, strict=True)]
                pages.restore(pages.of)
                continue
            try:
                pages.reserve(wanted)
            except ValueError:
                continue
            for b, n in enumerate(more):
                for _ in range(n):
                    at = len(rows[b])
                    pool[pages.of[b][at // 4], at % 4] = number
                    rows[b].append(number)
                    number += 1
        else:
            if what == 1:
                index = [draw(batch) for _ in range(batch)]
                wanted = [rows[source] for source in index]
            else:
                index = list(range(batch))
                wanted = [row[: max(0, len(row) - draw(3))] for row in rows]
            try:
                source, target = pages.reorder(index, [len(row) for row in wanted], back)
            except ValueError:
                continue
            pool[target] = pool[source]
            rows = [list(row) for row in wanted]
            for b, row in enumerate(rows):
                for page in pages.of[b][max(0, len(row) - back) // 4 :]:
                    assert pages.users[page] == 1
        check(pages)
        for own, row in zip(pages.of, rows, strict=True):
            assert pool[own].flatten()[: len(row)].tolist() == row
