"""Attribute the memory in a profile to the module and operator that allocated it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

MIB = 2**20
BACKWARD = "autograd::engine::evaluate_function: "  # before a node's name
BACKWARD_SCOPE = torch._C._profiler.RecordScope.BACKWARD_FUNCTION
LINE = "line "  # prefix of a line of user code: the range around a torch call
BORDER = "border "  # prefix of a number: start of a phase, in the profile of a whole step
CALLED = " called by "  # between a module and the line that called it, if lines are recorded
ROOT = "model"  # the range of the root module, whose name is empty


@dataclass(frozen=True)
class Allocation:
    """An allocation of `size` bytes, or a free if -1, at `time` in ns, during `phase`."""

    time: int
    address: int
    size: int
    where: str = ""  # the innermost module, or "" outside all modules
    operator: str = ""  # the outermost operator called there
    phase: str = ""
    line: str = ""  # user code line of the call, if `Lines` was on; see `read`
    maker: str = ""  # in a backward: module whose forward created the running node


def read(tree: Iterable[Any], device: str) -> list[Allocation]:
    """Return the allocations and frees on that device type, in order, from the event tree of a
    profile with profile_memory=True and the named ranges of observers.trace and measure.lines.

    Allocations of an autograd node get the module and the line of the forward that created it,
    unless the node has lines of its own.
    """
    kinds, scope = torch._C._profiler._EventType, torch._C._profiler.RecordScope.USER_SCOPE
    made: dict[int, tuple[str, str]] = {}  # module and line, by the numbers of nodes
    found: list[Allocation] = []
    phases: list[tuple[int, str]] = []

    def visit(event: Any, at: _Place) -> _Place:
        """Return the place of the event's children."""
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
            if at.node in made and not made[at.node][1]:  # a user-defined Function
                made[at.node] = made[at.node][0], line
            return replace(at, line=line)
        elif about.scope == scope:
            name, called, line = event.name.partition(CALLED)
            if called:
                return replace(at, where=name, operator="", line=line)
            # else a range of torch or of the program
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
    """Place of an event in the tree."""

    where: str = ""
    operator: str = ""
    line: str = ""
    maker: str = ""
    node: int = -1  # sequence number of the node being created; below -1 if recomputed
    inside: bool = False  # inside a running node


def _with_phases(found: list[Allocation], phases: list[tuple[int, str]]) -> Iterator[Allocation]:
    """Assign phases by time: a GPU backward runs in its own thread, outside the range."""
    at, phase = 0, ""
    for a in found:
        while at < len(phases) and phases[at][0] <= a.time:
            phase, at = phases[at][1], at + 1
        yield replace(a, phase=phase)
