"""Host side of a page table: allocation of a pool's pages to sequences."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Pages:
    """Pool of pages allocated to B sequences, and the table that kernels read.

    `table` [B, PER] int32 on the device holds the pages of each sequence in order, -1 where it has
    none; a sequence grows by a page without a copy. Several sequences may share a page: `users`
    counts them, and a sequence that will write into one gets a copy first (see `reorder`). The host
    allocates without reading from the device, and writes the table when it changes.
    """

    def __init__(self, table: Tensor, page: int, pages: int) -> None:
        self.table, self.page, self.pages = table, page, pages
        self._mirror = torch.full(table.shape, -1, dtype=torch.int32)  # the table, on the host
        self.restore([[]] * table.shape[0])

    @property
    def free(self) -> int:
        """Number of pages that no sequence uses."""
        return len(self._free)

    @property
    def shared(self) -> bool:
        """True if sequences share a page."""
        return any(count > 1 for count in self.users)

    def reserve(self, tokens: Sequence[int]) -> None:
        """Reserve pages for so many tokens per sequence; ValueError, without change, if full."""
        needed = [max(0, self.count(t) - len(own)) for t, own in zip(tokens, self.of, strict=True)]
        if not any(needed):
            return
        if sum(needed) > self.free:
            raise ValueError(
                f"the cache is full: {sum(needed)} more pages of {self.page} tokens are needed and "
                f"{self.free} of {self.pages} are free; reset(rows) frees those of sequences that "
                "have ended, and more pages= would do"
            )
        for row, count in enumerate(needed):
            own = self.of[row]
            for _ in range(count):
                page = self._free.pop()
                self.users[page] = 1
                self._mirror[row, len(own)] = page
                own.append(page)
        self._write()

    def release(self, row: int) -> None:
        """Free the pages of a sequence."""
        for page in self.of[row]:
            self.users[page] -= 1
            if not self.users[page]:
                self._free.append(page)
        self.of[row].clear()
        self._mirror[row] = -1
        self._write()

    def reorder(
        self, index: Sequence[int], lengths: Sequence[int], back: int
    ) -> tuple[list[int], list[int]]:
        """Replace sequence b by index[b]; return (from, to): pages whose contents must be copied.

        It then has `lengths[b]` tokens. The pages of the newest `back` of them are still written
        to, so each sequence has its own; the complete pages before those are shared.
        ValueError, without any change, if the pool has too few.
        """
        before = [self.of[s][: self.count(n)] for s, n in zip(index, lengths, strict=True)]
        firsts = [max(0, length - back) // self.page for length in lengths]
        kept = [own[:first] for own, first in zip(before, firsts, strict=True)]
        taken = {page for own in kept for page in own}  # complete: no sequence writes into them
        copies = []
        for row, own in enumerate(before):
            for page in own[firsts[row] :]:
                if page in taken:
                    copies.append((row, len(kept[row]), page))
                taken.add(page)
                kept[row].append(page)
        # A page that is copied from stays with another, so that no copy overwrites a source.
        free = [page for page in range(self.pages) if page not in taken]
        if len(copies) > len(free):
            raise ValueError(
                f"the cache is full: the new order needs {len(copies)} more pages of {self.page} "
                f"tokens for what the sequences do not share and {len(free)} of {self.pages} are "
                "free; more pages= would do"
            )
        sources, targets = [], []
        for (row, slot, page), target in zip(copies, free, strict=False):
            kept[row][slot] = target
            sources.append(page)
            targets.append(target)
        self.restore(kept)
        return sources, targets

    def restore(self, of: Sequence[Sequence[int]]) -> None:
        """Set the pages of each sequence."""
        self.of, self.users = [list(own) for own in of], [0] * self.pages
        self._mirror.fill_(-1)
        for row, own in enumerate(self.of):
            self._mirror[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
            for page in own:
                self.users[page] += 1
        # A stack: the first ones are handed out first.
        self._free = [page for page in reversed(range(self.pages)) if not self.users[page]]
        self._write()

    def count(self, tokens: int) -> int:
        """Number of pages that so many tokens need."""
        return -(-tokens // self.page)

    def _write(self) -> None:
        # Not from pinned memory, so that the mirror may change again immediately.
        self.table.copy_(self._mirror, non_blocking=True)
