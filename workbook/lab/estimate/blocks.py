"""Blocks of CUDA's segments, and free lists."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field


@dataclass
class Range:
    """Address range of an expandable segment, and its page size in bytes."""

    start: int
    page: int


class Block:
    """A block of a segment, linked to its neighbours there. Unmapped blocks count as free.

    rank: orders free blocks of equal size, the smaller first.
    range: that of an expandable segment; None in a segment from cudaMalloc.
    since: number of searches before it became free.
    """

    __slots__ = (
        "address", "free", "home", "mapped", "next", "prev", "range", "rank", "since", "size",
    )  # fmt: skip

    def __init__(self, home: Home, address: int, size: int, rank: int, range: Range | None):
        self.home, self.address, self.size, self.rank, self.range = home, address, size, rank, range
        self.free = self.mapped = True
        self.prev: Block | None = None
        self.next: Block | None = None
        self.since = 0

    @property
    def whole(self) -> bool:
        """True if the block is the whole segment."""
        return self.prev is None and self.next is None

    @property
    def reach(self) -> int:
        """Maximum size in bytes to which it can grow in place."""
        after = self.next
        return self.size + (after.size if after is not None and not after.mapped else 0)

    def front(self, size: int, rank: int) -> Block:
        """Split off the first `size` bytes as a new block; this one keeps the rest."""
        front = Block(self.home, self.address, size, rank, self.range)
        front.prev, front.next = self.prev, self
        if self.prev is not None:
            self.prev.next = front
        self.prev = front
        self.address += size
        self.size -= size
        return front

    def rest(self, size: int, rank: int) -> Block:
        """Split off all but the first `size` bytes as a new block; this one keeps those."""
        rest = Block(self.home, self.address + size, self.size - size, rank, self.range)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next, self.size = rest, size
        return rest

    def merge(self) -> None:
        """Merge free neighbours with the same `mapped`, removing them from their lists."""
        for other in (self.prev, self.next):
            if other is None or not other.free or other.mapped != self.mapped:
                continue
            other.home.take(other)
            if other is self.prev:
                self.address, self.prev = other.address, other.prev
                if other.prev is not None:
                    other.prev.next = self
            else:
                self.next = other.next
                if other.next is not None:
                    other.next.prev = self
            self.size += other.size


@dataclass
class Home:
    """Cache of the free blocks of a pool, a stream and a size class: mapped ones sorted by size,
    rank and address, unmapped ones by address."""

    pool: int
    small: bool
    free: list[tuple[int, int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)

    def add(self, block: Block) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.rank, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def take(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.rank, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def fitting(self, size: int) -> int | None:
        """Index of the smallest block that holds `size`. Expandable ones are compared by reach."""
        free = self.free
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        if free[at][3].range is not None:
            while at + 1 < len(free) and free[at + 1][3].reach < free[at][3].reach:
                at += 1
        return at

    def growing(self, size: int) -> Block | None:
        """Return the lowest unmapped block, or the free one before it, that starts a free range of
        at least `size`."""
        for _, block in self.unmapped:
            first = block.prev if block.prev is not None and block.prev.free else block
            room, after = 0, first
            while room < size and after is not None and after.free:
                room += after.size
                after = after.next
            if room >= size:
                return first
        return None
