"""Properties of CUDA's caching allocator, whatever is allocated and freed."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from workbook.lab.estimate.alloc_conf import MIB, Settings
from workbook.lab.estimate.caching import ORDERS, CachingAllocator

CONFS = (
    "",
    "max_split_size_mb:64",
    "expandable_segments:True",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.7",
)
SIZES = st.one_of(st.integers(1, 4 * MIB), st.integers(MIB, 100 * MIB))


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(CONFS),
    st.sampled_from(ORDERS),
    st.lists(st.tuples(st.integers(0, 9), SIZES, st.integers(0, 1)), max_size=60),
)
def test_blocks_never_overlap_and_all_can_be_given_back(conf, order, events):
    cuda = CachingAllocator(Settings.parse(conf), 400 * MIB, order=order)
    live: dict[int, int] = {}
    for name, size, stream in events:
        if name in live:
            cuda.free(name)
            del live[name]
        elif cuda.alloc(name, size, stream) is None:
            live[name] = size
        blocks = cuda.blocks()
        assert all(a + size <= b for (a, size, _), (b, _, _) in pairwise(blocks))
        assert sum(size for _, size, _ in blocks) == cuda.reserved <= cuda.peak_reserved
        assert sum(size for _, size, free in blocks if not free) == cuda.allocated
        assert sum(live.values()) <= cuda.allocated <= cuda.reserved <= 400 * MIB
    for name in live:
        cuda.free(name)
    cuda.empty_cache()
    assert (cuda.allocated, cuda.reserved, cuda.blocks()) == (0, 0, [])
