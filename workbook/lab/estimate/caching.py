"""Model of torch's caching allocator for CUDA, without a device: computes bytes allocated and
reserved from allocations and frees.

The rules are those of the native backend of torch 2.11 to 2.13. A request is rounded up to 512
bytes and served from the smallest free block of its stream that holds it, else from a new segment.
The remainder of a block becomes a free block if it is large enough; else it counts as allocated.
So `allocated` exceeds the sum of the requests, and `reserved` exceeds `allocated`.

Not modelled: blocks used by a second stream (`record_stream`), which are freed late, memory
shared between processes, and user-defined allocators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from nsa.spelling import choice
from workbook.lab.estimate.alloc_conf import BLOCK, MIB, Settings
from workbook.lab.estimate.blocks import Block, Home, Range

SMALL = MIB  # largest request of the small pool, and largest unsplit remainder of a large block
SMALL_SEGMENT = ROUND_SEGMENT = 2 * MIB
MEDIUM = 10 * MIB  # below it a large request opens a segment of Settings.large_segment
BOUNDLESS = 2**50  # bytes; for an unknown GPU
# Choice among free blocks of one size: oldest segment, then lowest address (2.13); oldest block
# (2.12); lowest address (2.11). The first and the last agree if cudaMalloc returns ascending
# addresses.
ORDERS = ("segment", "block", "address")
DEFAULT = Settings()


@dataclass(frozen=True)
class OutOfMemory:
    """A failed allocation, in bytes, after all releasable memory was released."""

    asked: int
    allocated: int
    reserved: int
    limit: float  # bytes that the process may reserve
    event: int | None = None  # index in the replayed stream
    phase: str = ""

    @property
    def fragmented(self) -> int:
        """Bytes reserved and free, but in pieces that can be neither used nor released."""
        return self.reserved - self.allocated

    def __str__(self) -> str:
        numbers = (self.asked, self.allocated, self.fragmented, self.limit)
        asked, held, apart, limit = (f"{number / MIB:,.1f} MiB" for number in numbers)
        when = "" if self.event is None else f" at event {self.event}, {self.phase or 'set-up'}"
        return f"no room for {asked}{when}: {held} are allocated and {apart} in pieces, of {limit}"


class CachingAllocator:
    """Allocator of one GPU. The caller chooses ids; `allocated` and `reserved` count as in torch.

    capacity: bytes of the GPU available to this process, excluding its context; None means no
        limit.
    total: bytes of the whole GPU, to which per_process_memory_fraction applies; None: capacity.
    order: tie-breaking between free blocks of one size, see ORDERS.
    place: returns the address of a new segment of a given size; None: after the last one.
    """

    def __init__(
        self,
        settings: Settings = DEFAULT,
        capacity: int | None = None,
        *,
        total: int | None = None,
        order: str = ORDERS[0],
        place: Callable[[int], int] | None = None,
    ) -> None:
        choice("order", order, ORDERS)
        total = capacity if total is None else total
        if settings.fraction < 1 and total is None:
            raise ValueError("per_process_memory_fraction is a share of the GPU: give its capacity")
        self.settings, self.order = settings, order
        self.capacity = math.inf if capacity is None else capacity
        self.total = BOUNDLESS if total is None else total
        # Without a fraction torch sets no limit, and collects nothing.
        self.allowed = int(settings.fraction * self.total) if settings.fraction < 1 else math.inf
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.retries = 0  # allocations for which the whole cache was released
        self._place = place or self._behind
        self._end = self._rank = self._searches = 0
        self._homes: dict[tuple[int, int, bool], Home] = {}
        self._live: dict[Hashable, Block | None] = {}

    def alloc(
        self, name: Hashable, size: int, stream: int = 0, pool: int = 0
    ) -> OutOfMemory | None:
        """Allocate `size` bytes as `name`, on a stream; in a private pool (CUDA graphs) unless 0.

        Returns OutOfMemory if there is no room; the allocator stays usable, as torch's does.
        ValueError for an id in use and for a size below 0.
        """
        if size < 0 or name in self._live:
            what = f"{size} bytes" if size < 0 else f"{name!r}, which is allocated already"
            raise ValueError(f"cannot allocate {what}")
        if size == 0:  # torch allocates no memory for it
            self._live[name] = None
            return None
        settings = self.settings
        rounded = settings.rounded(size)
        key = (pool, stream, rounded <= SMALL)
        home = self._homes.get(key)
        if home is None:
            home = self._homes[key] = Home(pool, key[2])
        block = self._cached(home, rounded) or self._new(home, rounded)
        if block is None:
            limit = min(self.capacity, self.allowed)
            return OutOfMemory(size, self.allocated, self.reserved, limit)
        left = block.size - rounded
        if home.small or settings.expandable:
            split = left >= BLOCK
        else:
            split = left > SMALL and rounded < settings.max_split
        if split:
            rest, block = block, block.front(rounded, self._ranked(block))
            self._add(rest)
        block.free = False
        self._live[name] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return None

    def free(self, name: Hashable) -> None:
        """Return the block to the cache. KeyError for an id that is not allocated."""
        block = self._live.pop(name)
        if block is not None:
            self.allocated -= block.size
            block.free = True
            block.merge()
            self._add(block)

    def empty_cache(self) -> None:
        """Release every segment without a live block, and such pages of expandable segments, except
        those of private pools."""
        for home in [home for home in self._homes.values() if home.pool == 0]:
            for block in [entry[3] for entry in home.free]:
                if block.range is not None:
                    self._unmap(block)
                elif block.whole:
                    self._give_back(block)

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def blocks(self) -> list[tuple[int, int, bool]]:
        """(address, bytes, True if free) of all reserved blocks, sorted by address."""
        held = [(b.address, b.size, False) for b in self._live.values() if b is not None]
        cached = [(a, size, True) for h in self._homes.values() for size, _, a, _ in h.free]
        return sorted(held + cached)

    def _cached(self, home: Home, size: int) -> Block | None:
        settings = self.settings
        if home.pool == 0 and not home.small:
            self._searches += 1
        at = home.fitting(size)
        if at is None:
            return None
        block = home.free[at][3]
        if size < settings.max_split <= block.size:
            return None
        if size >= settings.max_split and block.size >= size + settings.max_rounding:
            return None
        del home.free[at]
        return block

    def _new(self, home: Home, size: int) -> Block | None:
        """Return a block of a new segment, if necessary after releasing cached blocks."""
        if self.settings.threshold and self.allowed < math.inf:
            self._collect()
        block = self._segment(home, size)
        if block is None and self._give_back_oversize(home, size):
            block = self._segment(home, size)
        if block is None and home.pool == 0:  # nothing is released during a capture
            self.empty_cache()
            self.retries += 1
            block = self._segment(home, size)
        return block

    def _segment(self, home: Home, size: int) -> Block | None:
        if home.small:
            wanted = SMALL_SEGMENT
        elif size < MEDIUM:
            wanted = self.settings.large_segment
        else:
            wanted = -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        if self.reserved + wanted > self.allowed:
            return None
        if self.settings.expandable:
            return self._expanded(home, size)
        if self.reserved + wanted > self.capacity:
            return None
        self._reserve(wanted)
        return Block(home, self._place(wanted), wanted, self._ranked(), None)

    def _expanded(self, home: Home, size: int) -> Block | None:
        """Map and return at least `size` bytes at the lowest address with enough room."""
        block = home.growing(size)
        if block is None:
            page = SMALL_SEGMENT if home.small else self.settings.large_segment
            room = -(-max(self.total + self.total // 8, size) // page) * page
            within = Range(self._behind(room), page)
            block = Block(home, within.start, room, self._ranked(), within)
            block.mapped = False
            self._add(block)
        if not block.mapped and not self._map(block, min(size, block.size)):
            return None
        while block.size < size:
            after = block.next
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after
        home.take(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map whole pages from the block's start, merging free neighbours; False: no room."""
        size = -(-size // block.range.page) * block.range.page
        if self.reserved + size > self.capacity:
            return False
        block.home.take(block)
        if size < block.size:
            rest = block.rest(size, self._ranked(block))
            rest.mapped = False
            self._add(rest)
        block.mapped = True
        block.merge()
        self._add(block)
        self._reserve(size)
        return True

    def _unmap(self, block: Block) -> None:
        """Unmap the pages entirely inside a free block; drop a segment without pages."""
        start, page = block.range.start, block.range.page
        first = -(-(block.address - start) // page) * page + start
        size = (block.address + block.size - start) // page * page + start - first
        if size <= 0:
            return
        block.home.take(block)
        if first > block.address:
            self._add(block.front(first - block.address, self._ranked(block)))
        if size < block.size:
            self._add(block.rest(size, self._ranked(block)))
        block.mapped = False
        block.merge()
        if not block.whole:
            self._add(block)
        self.reserved -= size

    def _give_back(self, block: Block) -> None:
        block.home.take(block)
        self.reserved -= block.size

    def _give_back_oversize(self, home: Home, size: int) -> bool:
        """Release the smallest sufficient unsplittable block for `size`, else the largest ones;
        return True if enough was released."""
        limit = self.settings.max_split
        if limit == math.inf or self.settings.expandable:
            return False
        wanted = max(size, limit)
        enough = next((entry[3] for entry in home.free if entry[0] >= wanted), None)
        if enough is not None:
            self._give_back(enough)
            return True
        given = 0
        while given < wanted and home.free and home.free[-1][0] >= limit:
            given += home.free[-1][0]
            self._give_back(home.free[-1][3])
        return given >= wanted

    def _collect(self) -> None:
        """Release segments cached for at least the mean age, until the reserved bytes are at most
        the threshold."""
        excess = self.reserved - int(self.settings.threshold * self.allowed)
        homes = [h for (pool, _, small), h in self._homes.items() if pool == 0 and not small]
        found = [entry[3] for home in homes for entry in home.free]
        ages = {b: self._searches - b.since for b in found if b.whole and b.range is None}
        while excess > 0 and ages:
            mean = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= mean]:
                self._give_back(block)
                excess -= block.size
                del ages[block]

    def _behind(self, size: int) -> int:
        self._end += size
        return self._end - size

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _ranked(self, parent: Block | None = None) -> int:
        """Return the rank of a new segment or of a part of a block; smaller ranks win ties."""
        if self.order == "address" or (self.order == "segment" and parent is not None):
            return parent.rank if parent is not None else 0
        self._rank += 1
        return self._rank

    def _add(self, block: Block) -> None:
        block.since = self._searches
        block.home.add(block)
