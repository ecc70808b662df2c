"""Which page of a pool holds which tokens of which sequence: the host's side of a page table."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Pages:
    """A pool of pages handed out to B sequences, and the table that kernels read.

    `table` [B, PER] int32 on the device holds the pages of each sequence in order, -1 where it has
    none; a sequence grows by a page without a copy. A page may serve several sequences: `users`
    counts them, and who is about to write into one takes a copy first (see `reorder`). The host
    decides all of it by numbers that it has, and writes the table when it changes.
    """

    def __init__(self, table: Tensor, page: int, pages: int) -> None:
        self.table, self.page, self.pages = table, page, pages
        self.of: list[list[int]] = [[] for _ in range(table.shape[0])]
        self.users = [0] * pages
        self._write()

    @property
    def free(self) -> int:
        """Pages that no sequence has."""
        return self.users.count(0)

    @property
    def shared(self) -> bool:
        """Whether any page serves two sequences."""
        return any(count > 1 for count in self.users)

    def reserve(self, tokens: Sequence[int]) -> None:
        """Room for so many tokens of each sequence, for all of them or, by ValueError, for none."""
        needed = [max(0, self.count(t) - len(own)) for t, own in zip(tokens, self.of, strict=True)]
        if not any(needed):
            return
        if sum(needed) > self.free:
            raise ValueError(
                f"the cache is full: {sum(needed)} more pages of {self.page} tokens are needed and "
                f"{self.free} of {self.pages} are free; reset(rows) frees those of sequences that "
                "have ended, and more pages= would do"
            )
        for own, count in zip(self.of, needed, strict=True):
            own += self._take(count)
        self._write()

    def release(self, row: int, keep: int = 0) -> None:
        """Gives back the pages of a sequence beyond its first `keep` tokens."""
        first = self.count(keep)
        for page in self.of[row][first:]:
            self.users[page] -= 1
        del self.of[row][first:]
        self._write()

    def reorder(
        self, index: Sequence[int], lengths: Sequence[int], back: int
    ) -> tuple[list[int], list[int]]:
        """Sequence b becomes what index[b] was; (from, to): pages whose contents are to be copied.

        It then has `lengths[b]` tokens. Of the newest `back` of them something is still to be
        written; the pages before those are complete and are shared, the others are its own.
        ValueError, and nothing changed, where the pool has too few.
        """
        before = [self.of[s][: self.count(n)] for s, n in zip(index, lengths, strict=True)]
        firsts = [max(0, length - back) // self.page for length in lengths]
        kept = [own[:first] for own, first in zip(before, firsts, strict=True)]
        taken = {page for own in kept for page in own}  # complete: nobody may write into them
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
        self.of = kept
        self._count_users()
        self._write()
        return sources, targets

    def restore(self, of: Sequence[Sequence[int]]) -> None:
        """The pages of each sequence as they were when somebody wrote `of` down."""
        self.of = [list(own) for own in of]
        self._count_users()
        self._write()

    def count(self, tokens: int) -> int:
        """Pages that so many tokens fill or begin."""
        return -(-tokens // self.page)

    def _take(self, count: int) -> list[int]:
        taken = [page for page, users in enumerate(self.users) if users == 0][:count]
        for page in taken:
            self.users[page] = 1
        return taken

    def _count_users(self) -> None:
        self.users = [0] * self.pages
        for own in self.of:
            for page in own:
                self.users[page] += 1

    def _write(self) -> None:
        rows = [own + [-1] * (self.table.shape[1] - len(own)) for own in self.of]
        self.table.copy_(torch.tensor(rows, dtype=torch.int32), non_blocking=True)
