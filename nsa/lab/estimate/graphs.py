"""What a training holds whose step is a CUDA graph, and what its compiled blocks hold.

Steps before the capture run on a stream of their own. Then what is cached is given back, and the
capture allocates from a private pool, whose segments stay as long as the graph does. See
`nsa.model.train.CapturedStep`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from nsa.lab.estimate.trace import steady
from nsa.lab.measure.allocations import Stream

SETTLED = 3  # steps after which further ones leave the allocator as they found it
SIDE = 1  # the number of the steps' own stream, and of the private pool
# Peaks with compiled blocks over those without, the least and the most of the pairs in the records
# of 04_throughput on an H200 with torch 2.11, runs/2026-11-23 and 2026-11-24.
COMPILED = (0.878, 0.954)


@dataclass
class Run:
    """A training until its step is captured, as `reserved.replay` takes it."""

    stream: Stream = field(default_factory=Stream)
    homes: list[tuple[int, int]] = field(default_factory=list)  # (stream, pool) of each event
    emptied: int = 0  # the event before which what is cached is given back


def graphed(first: Stream, warmup: int) -> Run:
    """The run whose first step's stream is `first`, as `trace` has it, with `warmup` steps before
    the capture."""
    run, later, names, fresh = Run(), steady(first), {}, count(1)
    made, begin = run.stream, first.marks[0][0]
    sizes = zip(first.addresses[:begin], first.sizes[:begin], strict=True)
    gone = {address for address, size in sizes if size < 0}  # a model is made on the host

    def add(address: int, size: int, home: tuple[int, int]) -> None:
        made.alloc(address, size)
        run.homes.append(home)

    turns = [(first, 0)] + [(later, later.marks[0][0])] * min(warmup, SETTLED)
    for number, (step, start) in enumerate(turns):
        captured, phase = number == len(turns) - 1, ""
        inputs: dict[int, int] = {}
        for what, *about in _items(step, start):
            if what == "mark":
                if phase == "data" and captured:
                    for size in inputs.values():  # the graph reads copies, which stay
                        add(next(fresh), size, (0, 0))
                    run.emptied = len(made)
                phase = about[0]
                made.mark(phase)
            elif what == "tag":
                made.tag(about[0], {names[address] for address in about[1] if address in names})
            else:
                address, size = about
                own = phase in ("", "data", "end")
                if address in gone:
                    continue
                if size >= 0:
                    names[address] = next(fresh)
                    if phase == "data":
                        inputs[address] = size
                    add(names[address], size, (0, 0) if own else (SIDE, SIDE * captured))
                elif address in names:
                    inputs.pop(address, None)
                    add(names.pop(address), size, (0, 0))
    return run


def _items(stream: Stream, start: int) -> Iterator[tuple]:
    """Events from `start` on, ("event", address, size), and between them ("mark", phase) and
    ("tag", category, addresses) where they stand."""
    between = [(at, 0, "mark", (phase,)) for at, phase in stream.marks]
    between += [(at, 1, "tag", about) for at, *about in stream.tags]
    ordered = iter(sorted((x for x in between if x[0] >= start), key=lambda x: x[:2]))
    upcoming = next(ordered, None)
    for at in range(start, len(stream) + 1):
        while upcoming is not None and upcoming[0] <= at:
            yield upcoming[2], *upcoming[3]
            upcoming = next(ordered, None)
        if at < len(stream):
            yield "event", stream.addresses[at], stream.sizes[at]
