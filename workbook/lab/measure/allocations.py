"""Compute peaks by phase and by category from allocations and frees. No device, no torch.

Addresses are constantly reused, so a stream is first turned into blocks, each with a size, a
birth and a death; categories belong to blocks. Snapshots of torch.cuda.memory are plain lists and
dicts, so reading them needs no GPU either.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "inputs",  # allocated in the data phase, alive at its end
    "activations",  # allocated in the forward, alive at its end
    "temporaries",  # the rest of what was allocated
    "resident",  # alive before, and none of the first three, such as caches, workspaces
)
_KEPT = {"data": "inputs", "forward": "activations"}
FREE = -1  # in a Stream, in place of a size


class Stream:
    """Events of an allocator, in order, with marks where a phase starts and tags for known blocks.

    16 bytes per event. Blocks before the first mark exist when the recording starts.
    """

    def __init__(self) -> None:
        self.addresses = array("q")
        self.sizes = array("q")  # bytes; a free has -1
        self.marks: list[tuple[int, str]] = []
        self.tags: list[tuple[int, str, frozenset[int]]] = []

    def __len__(self) -> int:
        return len(self.sizes)

    def alloc(self, address: int, size: int) -> None:
        self.addresses.append(address)
        self.sizes.append(size)

    def free(self, address: int) -> None:
        self.alloc(address, FREE)

    def mark(self, phase: str) -> None:
        """Mark the start of a phase; "end" starts none. A phase may occur more than once."""
        self.marks.append((len(self), phase))

    def tag(self, category: str, addresses: Iterable[int]) -> None:
        """Assign the blocks now alive at these addresses to that category for their lifetime."""
        if category not in CATEGORIES:
            raise ValueError(f"no category {category!r}; there are {', '.join(CATEGORIES)}")
        self.tags.append((len(self), category, frozenset(addresses)))


@dataclass
class Lifetimes:
    """The blocks of a stream: bytes, births and deaths as event indices (number of events + 1:
    never freed), all [N] int64, `categories` as indices into CATEGORIES; and the phases, each
    with its first event and the one after its last."""

    sizes: np.ndarray
    born: np.ndarray
    died: np.ndarray
    categories: np.ndarray
    spans: list[tuple[str, int, int]]
    events: int
    unknown_frees: int
    lost_bytes: int

    def alive(self, at: int) -> np.ndarray:
        """[N] bool: blocks held after `at` events."""
        return (self.born < at) & (self.died > at)

    def held(self, at: int) -> dict[str, int]:
        """Bytes by category after `at` events."""
        alive, found = self.alive(at), {}
        for i, name in enumerate(CATEGORIES):
            found[name] = int(self.sizes[alive & (self.categories == i)].sum())
        return found

    def level(self, category: str | None = None) -> np.ndarray:
        """Bytes held after 0, 1, ... events, [events + 1], for one category or all."""
        chosen = np.full(len(self.sizes), True)
        if category is not None:
            chosen = self.categories == CATEGORIES.index(category)
        deltas = np.zeros(self.events + 1, dtype=np.int64)
        np.add.at(deltas, self.born[chosen] + 1, self.sizes[chosen])
        freed = chosen & (self.died <= self.events)
        np.subtract.at(deltas, self.died[freed], self.sizes[freed])
        return np.cumsum(deltas)

    def peaks(self) -> dict[str, int]:
        """Number of events after which each phase holds the most bytes."""
        total, found = self.level(), {}
        for phase, start, end in self.spans:
            at = start + int(np.argmax(total[start : end + 1]))
            if phase not in found or total[at] > total[found[phase]]:
                found[phase] = at
        return found


def lifetimes(stream: Stream) -> Lifetimes:
    """Return the stream's blocks. ValueError for a stream without a phase."""
    borders = pairwise([*stream.marks, (len(stream), "end")])
    spans = [(phase, start, end) for (start, phase), (end, _) in borders if phase != "end"]
    if not spans:
        raise ValueError("the stream marks no phase; call mark(phase) where each one starts")
    sizes, born, died, tagged, unknown, lost = _blocks(stream)
    categories = _categories(born, died, tagged, spans, stream.marks[0][0])
    return Lifetimes(sizes, born, died, categories, spans, len(stream), unknown, lost)


def replay(stream: Stream) -> dict:
    """Return bytes at the overall peak and at each phase's peak, both by category, and the maximum
    `held` by each category: {"peak", "phases", "by_category", "by_phase_category", "held",
    "cross_check"}. A phase's peak includes blocks alive at its start.

    "cross_check" has "unknown_frees", of addresses never allocated, and "lost_bytes", of blocks
    whose free had to be inferred from reuse of their address: 0 for a complete stream.

    ValueError for a stream without a phase.
    """
    lives = lifetimes(stream)
    by_phase = {phase: lives.held(at) for phase, at in lives.peaks().items()}
    phases = {phase: sum(held.values()) for phase, held in by_phase.items()}
    held = {}
    for name in CATEGORIES:  # one at a time: a stream may have 10^7 events
        level = lives.level(name)
        held[name] = max(int(level[start : end + 1].max()) for _, start, end in lives.spans)
    highest = max(phases, key=phases.get)
    return {
        "peak": phases[highest],
        "phases": phases,
        "by_category": by_phase[highest],
        "by_phase_category": by_phase,
        "held": held,
        "cross_check": {
            "events": lives.events,
            "unknown_frees": lives.unknown_frees,
            "lost_bytes": lives.lost_bytes,
        },
    }


def timeline(stream: Stream, most: int = 1200) -> dict:
    """Return the data for a plot of one step: {"events": allocator event indices, "phases": [name,
    event at which it starts], "mib": {category: values at those events}}, without empty
    categories. More than `most` events are downsampled to the maximum of each interval, so the
    peak is kept."""
    lives = lifetimes(stream)
    total, start, end = lives.level(), lives.spans[0][1], lives.spans[-1][2]
    size = max(1, -(-(end - start + 1) // most))
    chosen = [
        i + int(np.argmax(total[i : min(i + size, end + 1)])) for i in range(start, end + 1, size)
    ]
    levels = {name: lives.level(name)[chosen] / 2**20 for name in CATEGORIES}
    return {
        "events": [i - start for i in chosen],
        "phases": [[phase, first - start] for phase, first, _ in lives.spans],
        "mib": {n: np.round(v, 4).tolist() for n, v in levels.items() if v.max() > 0},
    }


def _blocks(stream: Stream):
    """Sizes [N], births and deaths [N] as event counts (len + 1: never), tags [N] (-1: none)."""
    sizes, born, died, tagged = array("q"), array("q"), array("q"), array("b")
    live: dict[int, int] = {}
    unknown = lost = 0
    tags = deque(stream.tags)

    def tag(position: int) -> None:
        while tags and tags[0][0] <= position:
            _, category, addresses = tags.popleft()
            for address in addresses & live.keys():
                tagged[live[address]] = CATEGORIES.index(category)

    for position, (address, size) in enumerate(zip(stream.addresses, stream.sizes, strict=True)):
        tag(position)
        block = live.pop(address, None)
        if block is not None:
            died[block] = position + 1
        if size == FREE:
            unknown += block is None
        else:
            lost += sizes[block] if block is not None else 0
            live[address] = len(sizes)
            sizes.append(size)
            born.append(position)
            died.append(len(stream) + 1)
            tagged.append(-1)
    tag(len(stream))
    arrays = (np.array(x, dtype=np.int64) for x in (sizes, born, died, tagged))
    return (*arrays, unknown, lost)


def _categories(born, died, tagged, spans, start):
    found = np.full(len(born), CATEGORIES.index("temporaries"))
    for phase, begin, end in spans:
        if phase in _KEPT:
            kept = (born >= begin) & (born < end) & (died > end)
            found[kept] = CATEGORIES.index(_KEPT[phase])
    found[born < start] = CATEGORIES.index("resident")
    return np.where(tagged >= 0, tagged, found)


ROUNDING = 512  # bytes; the caching allocator's smallest block


def blocks_of(snapshot: dict, device: int) -> dict[int, int]:
    """Address and bytes of every block in use, as counted by torch.cuda.memory_allocated."""
    found = {}
    for segment in snapshot["segments"]:
        if segment["device"] != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found[block.get("address", address)] = block["size"]
            address += block["size"]
    return found


def add_history(stream: Stream, snapshot: dict, device: int, most: int) -> str:
    """Add the allocations and frees of a snapshot's trace, with sizes as counted by the
    statistics. Return "", or the reason for adding none: a trace of `most` entries.

    A trace records requested sizes. A block may be larger: rounded up to 512 bytes, or by up to
    1 MiB if the allocator did not split off the remainder. Blocks still alive have their true
    size; for blocks already freed only the rounding is known.

    A block counts as freed when the free is requested, as in torch.cuda.memory_allocated, although
    another stream may still hold it.
    """
    traces = snapshot["device_traces"]
    trace = traces[device] if device < len(traces) else []
    if len(trace) >= most:
        return f"the history overflowed {most} entries"
    alive = blocks_of(snapshot, device)
    events: list[tuple[int, int]] = []
    for entry in reversed(trace):
        action, address = entry["action"], entry["addr"]
        if action == "alloc":
            rounded = max(1, -(-entry["size"] // ROUNDING)) * ROUNDING
            events.append((address, alive.pop(address, rounded)))
        elif action == "free_requested":
            alive.pop(address, None)
            events.append((address, FREE))
    for address, size in reversed(events):
        stream.alloc(address, size)
    return ""
