"""Who allocated what is held: a profile's memory by the module and operator that asked for it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nsa.lab.measure.activation_model import activations
from nsa.lab.oracles.steps import anywhere

MIB = 2**20
PHASES = ("data", "forward", "backward", "optimizer", "graph")
STEP = "step "  # and its number: the range around one
BACKWARD = "autograd::engine::evaluate_function: "  # before a node's name
BACKWARD_SCOPE = torch._C._profiler.RecordScope.BACKWARD_FUNCTION
LINE = "line "  # before a line of the user's: the range around a call of torch's
BORDER = "border "  # and its number: where a phase begins, in the profile of a whole step
CALLED = " called by "  # between a module and the line that called it, where lines are looked at
ROOT = "model"  # the range of the module that has no name of its own

Key = tuple[str, str]  # where, operator


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


def read(
    tree: Iterable[Any], device: str, made: dict[int, tuple[str, str]] | None = None
) -> tuple[list[Allocation], dict[str, float]]:
    """The allocations and frees on that kind of device, in order, and ms in each phase and, as
    "step", in the steps: out of the event tree of a profile with profile_memory=True, whose named
    ranges are those of observers.trace and of measure.lines.

    What a node of autograd allocates has the module and the line of the forward that made it, but
    for lines of its own. `made` keeps those by the nodes' numbers, for a backward that is in
    another profile than its forward.
    """
    kinds, scope = torch._C._profiler._EventType, torch._C._profiler.RecordScope.USER_SCOPE
    attributing, made = made is not None, {} if made is None else made
    found: list[Allocation] = []
    phases: list[tuple[int, str]] = []
    host_ms: dict[str, float] = defaultdict(float)

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
            if attributing:  # a range of torch's own, or of the program's
                return replace(at, operator=at.operator or name)
            step = event.name.startswith(STEP)
            if not step and event.name not in PHASES:
                return replace(at, where=event.name, operator="")
            host_ms["step" if step else event.name] += event.duration_time_ns / 1e6
            phases.extend([] if step else [(event.start_time_ns, event.name)])
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
    return list(_with_phases(found, sorted(phases))), host_ms


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


def _walk(found: Iterable[Allocation]) -> Iterator[tuple[Allocation, dict[int, Allocation], int]]:
    """Each event with what is held after it, by address, and how many bytes that is. Frees of what
    was there before are left out."""
    live: dict[int, Allocation] = {}
    held = 0
    for a in found:
        before = live.pop(a.address, None)
        held -= before.size if before is not None else 0
        if a.size > 0:
            live[a.address] = a
            held += a.size
        yield a, live, held


def table(found: list[Allocation], steps: int) -> list[dict[str, Any]]:
    """A row for each (where, operator), {where, operator, peak_mib, allocated_mib, allocations}:
    MiB held at the moment at which all of them together hold most, the largest first; MiB and
    number of allocations in a step. Layers count together: blocks.*.mlp."""
    peak, at_peak = 0, -1
    for number, (_, _, held) in enumerate(_walk(found)):
        if held > peak:
            peak, at_peak = held, number
    rows: dict[Key, list[float]] = defaultdict(lambda: [0, 0, 0])
    for number, (a, live, _) in enumerate(_walk(found)):
        if a.size > 0:
            row = rows[_key(a)]
            row[1] += a.size / steps
            row[2] += 1 / steps
        if number == at_peak:
            for one in live.values():
                rows[_key(one)][0] += one.size
    named = [
        {"where": where, "operator": operator, "peak_mib": held / MIB}
        | {"allocated_mib": asked / MIB, "allocations": round(count, 1)}
        for (where, operator), (held, asked, count) in rows.items()
    ]
    return sorted(named, key=lambda row: (-row["peak_mib"], -row["allocated_mib"]))


def _key(a: Allocation) -> Key:
    where = anywhere(a.where) or a.phase
    return where + " (recomputed)" * (bool(a.where) and a.phase == "backward"), a.operator


def kept(found: list[Allocation]) -> list[Allocation]:
    """What the last forward allocated and still held when it ended."""
    ends = [number for number, a in enumerate(found) if a.phase == "forward"]
    for number, (_, live, _) in enumerate(_walk(found)):
        if ends and number == ends[-1]:
            return [a for a in live.values() if a.phase == "forward"]
    return []


def part_of(name: str) -> str:
    """The part of a LanguageModel, as `Activations.terms` names it, that a module or parameter is
    of; the loss is computed by the model itself."""
    for part in ("attention", "mlp"):
        if f".{part}" in name:
            return part
    return "head" if name.partition(".")[0] in (ROOT, "head") else "residual"


def against_shapes(
    found: list[Allocation], model: nn.Module, tokens: int, rows: int, dtype: str, backend: str
) -> list[dict[str, Any]]:
    """A row for each part of a LanguageModel with NSA, {part, predicted_mib, kept_mib}, the largest
    prediction first: what a forward of [rows, tokens] keeps for the backward, by
    `activation_model.activations` and in the profile. Weights that autocast has cast count to the
    part whose they are."""
    terms = activations(model.config, tokens, rows, dtype, backend).terms
    if dtype != "fp32":
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and not name.startswith("embed"):
                terms[part_of(name)] += 2 * weight.numel()
    held: dict[str, int] = defaultdict(int)
    for a in kept(found):
        held[part_of(a.where)] += a.size
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    return [
        {"part": part, "predicted_mib": size / MIB, "kept_mib": held[part] / MIB}
        for part, size in ordered
    ]
