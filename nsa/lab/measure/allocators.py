"""Who allocated what is held: a profile's memory by the module and operator that asked for it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

MIB = 2**20
BACKWARD = "autograd::engine::evaluate_function: "  # before a node's name
BACKWARD_SCOPE = torch._C._profiler.RecordScope.BACKWARD_FUNCTION
LINE = "line "  # before a line of the user's: the range around a call of torch's
BORDER = "border "  # and its number: where a phase begins, in the profile of a whole step
CALLED = " called by "  # between a module and the line that called it, where lines are looked at
ROOT = "model"  # the range of the module that has no name of its own


@dataclass(frozen=True)
class Allocation:
    """An allocation of `size` bytes, or with -1 a free, at `time` in ns, as `phase` ran."""

    time: int
    address: int
    size: int
    where: str = ""  # the innermost module, or "" outside all
    operator: str = ""  # the outermost that was called there
    phase: str = ""
    line: str = ""  # of the user's that called it, where `Lines` looked on; see `read`
    maker: str = ""  # in a backward the module whose forward made the node that runs


def read(tree: Iterable[Any], device: str) -> list[Allocation]:
    """The allocations and frees on that kind of device, in order: out of the event tree of a
    profile with profile_memory=True, whose named ranges are those of observers.trace and of
    measure.lines.

    What a node of autograd allocates has the module and the line of the forward that made it, but
    for lines of its own.
    """
    kinds, scope = torch._C._profiler._EventType, torch._C._profiler.RecordScope.USER_SCOPE
    made: dict[int, tuple[str, str]] = {}  # module and line, by the numbers of nodes
    found: list[Allocation] = []
    phases: list[tuple[int, str]] = []

    def visit(event: Any, at: _Place) -> _Place:
        """Where the event's children are."""
        about = event.extra_fields
        if event.tag == kinds.Allocation:
            if about.device.type == device and about.alloc_size:
                size = max(about.alloc_size, -1)
                inside = at.where, at.operator, "", at.line, at.maker
                found.append(Allocation(event.start_time_ns, about.ptr, size, *inside))
        elif event.tag != kinds.TorchOp:
            pass
        elif event.name.startswith(BORDER):
            phases.append((event.start_time_ns, event.name.removeprefix(BORDER)))
        elif event.name.startswith(LINE):
            line = event.name.removeprefix(LINE)
            if at.node in made and not made[at.node][1]:  # of a Function of the user's own
                made[at.node] = made[at.node][0], line
            return replace(at, line=line)
        elif about.scope == scope:
            name, called, line = event.name.partition(CALLED)
            if called:
                return replace(at, where=name, operator="", line=line)
            # else a range of torch's own, or of the program's
            return replace(at, operator=at.operator or name)
        elif event.name.startswith(BACKWARD):
            number = about.sequence_number
            again = made.get(-2 - number) if at.inside else None
            maker, line = again or made.get(number, ("", ""))
            name = at.operator or event.name.removeprefix(BACKWARD)
            return _Place(at.where, name, line, maker, inside=True)
        else:
            if about.sequence_number >= 0 and about.scope != BACKWARD_SCOPE:
                number = about.sequence_number
                number = -2 - number if at.inside else number  # a recomputed one, in another thread
                made[number] = at.where, at.line
                at = replace(at, node=number)
            return replace(at, operator=at.operator or event.name)
        return at

    waiting = [(event, _Place()) for event in reversed(list(tree))]
    while waiting:  # in order, so that a node's forward comes before it
        event, at = waiting.pop()
        inside = visit(event, at)
        waiting += [(child, inside) for child in reversed(event.children)]
    found.sort(key=lambda a: a.time)
    return list(_with_phases(found, sorted(phases)))


@dataclass(frozen=True)
class _Place:
    """Where in the tree an event is."""

    where: str = ""
    operator: str = ""
    line: str = ""
    maker: str = ""
    node: int = -1  # the number of the node that is being made; below -1 of a recomputed one
    inside: bool = False  # a node that runs


def _with_phases(found: list[Allocation], phases: list[tuple[int, str]]) -> Iterator[Allocation]:
    """By time: a GPU's backward runs in a thread of its own, outside of the range."""
    at, phase = 0, ""
    for a in found:
        while at < len(phases) and phases[at][0] <= a.time:
            phase, at = phases[at][1], at + 1
        yield replace(a, phase=phase)
