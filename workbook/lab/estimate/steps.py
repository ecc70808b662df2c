"""Consecutive steps of a training as seen by an allocator, built from the trace of the first:
launched eagerly, or captured into a CUDA graph.

Before a capture, steps run on a side stream. Then the cache is emptied, and the captured step
allocates from a private pool, whose segments live as long as the graph. See
`nsa.model.capture.CapturedStep`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from workbook.lab.estimate.trace import Trace, steady
from workbook.lab.measure.allocations import Stream

STEPS = 3  # further steps do not change the allocator state
SIDE = 1  # the number of the stream of a captured step, and of its pool
WORKSPACE = 32 * 2**20  # bytes of cuBLAS's largest workspace; each is a separate block
Home = tuple[int, int]  # a stream and a pool, 0 is the default


@dataclass
class Run:
    """A training's allocations and frees, for `reserved.replay`."""

    stream: Stream = field(default_factory=Stream)
    homes: list[Home] = field(default_factory=list)  # by event
    emptied: int | None = None  # the event before which the cache is emptied

    def add(self, address: int, size: int, home: Home = (0, 0)) -> None:
        self.stream.alloc(address, size)
        self.homes.append(home)


def run_of(traced: Trace, *, captured: bool = False, resident: int = 0) -> Run:
    """Build the steps of a training from its traced first step; the last is captured if `captured`.

    resident: bytes that libraries take from the allocator, once.
    """
    first, run, names, fresh = traced.stream, Run(), {}, count(1)
    later, begin = steady(first), first.marks[0][0]
    setup = zip(first.addresses[:begin], first.sizes[:begin], strict=True)
    gone = {address for address, size in setup if size < 0}  # the model is created on the host
    for begun in range(0, resident, WORKSPACE):
        run.add(next(fresh), min(WORKSPACE, resident - begun), (SIDE * captured, 0))
    turns = [(first, 0)] + [(later, later.marks[0][0])] * STEPS
    for number, (step, start) in enumerate(turns):
        last, phase = number == STEPS, ""
        inputs: dict[int, int] = {}
        for what, *about in _items(step, start):
            if what == "mark":
                if phase == "data" and captured and last:
                    for size in inputs.values():  # the graph reads copies, which stay allocated
                        run.add(next(fresh), size)
                    run.emptied = len(run.stream)
                phase = about[0]
                run.stream.mark(phase)
            elif what == "tag":
                found = {names[address] for address in about[1] if address in names}
                run.stream.tag(about[0], found)
            elif (address := about[0]) not in gone:
                size, own = about[1], phase in ("", "data", "end")
                if size >= 0:
                    names[address] = next(fresh)
                    if phase == "data":
                        inputs[address] = size
                    home = (traced.streams.get(address, 0), 0)
                    if captured and not own:
                        home = SIDE, SIDE * last
                    run.add(names[address], size, home)
                elif address in names:
                    inputs.pop(address, None)
                    run.add(names.pop(address), size)
    return run


def _items(stream: Stream, start: int) -> Iterator[tuple]:
    """Yield events from `start`, ("event", address, size), and in their positions ("mark", phase)
    and ("tag", category, addresses)."""
    between = [(at, 0, "mark", (phase,)) for at, phase in stream.marks if at >= start]
    between += [(at, 1, "tag", about) for at, *about in stream.tags if at >= start]
    between.sort(key=lambda item: item[:2])
    ordered = iter(between)
    upcoming = next(ordered, None)
    for at in range(start, len(stream) + 1):
        while upcoming is not None and upcoming[0] <= at:
            yield upcoming[2], *upcoming[3]
            upcoming = next(ordered, None)
        if at < len(stream):
            yield "event", stream.addresses[at], stream.sizes[at]
