"""What was seen of a trial: plain data that a verdict is judged from, and that JSON holds.

Whoever judges needs no process and no torch, so a verdict can be tested, and judged again later.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

PHASES = ("start", "data", "forward", "backward", "optimizer", "end", "other")
ENDS = ("returned", "exception", "signal", "exit", "stopped by the supervisor")
REASONS = ("stall", "deadline", "caller")  # why the supervisor stopped it
TOOLS = ("py-spy", "faulthandler", "native", "proc")


@dataclass(frozen=True)
class P:
    """How far a rank has come: its progress coordinate.

    step: the one it is in, -1 before the first. modules, fired: modules whose forward ended, and
    autograd nodes that ran, in this step; total: the nodes that its backwards have, 0 where not
    known. events: what the device, or the loop itself, said to have passed; collectives: those
    enqueued; phases: those entered; all three since the start. made: nodes of autograd that the
    main thread had made when it last looked: more of them is a move, though no place in a step.
    """

    step: int = -1
    phase: str = "start"
    modules: int = 0
    fired: int = 0
    total: int = 0
    events: int = 0
    collectives: int = 0
    phases: int = 0
    made: int = 0

    def after(self, other: P) -> bool:
        """Whether this is further than `other`, of the same run or of another run of its spec."""
        return self.key() > other.key()

    def key(self) -> tuple[int, ...]:
        """Grows with everything that a run does."""
        order = PHASES.index(self.phase) if self.phase in PHASES else len(PHASES)
        device = self.events + self.collectives
        return (self.step, self.modules + self.fired, device, self.phases, order)

    def __str__(self) -> str:
        more = f", node {self.fired} of {self.total}" if self.total else ""
        more += f", {self.events} events" if self.events else ""
        more += f", {self.collectives} collectives" if self.collectives else ""
        return f"step {self.step} {self.phase}, {self.modules} modules{more}"


@dataclass(frozen=True)
class Sample:
    """One look from outside, a few a second.

    t: seconds since the trial's start. beats: of a thread that needs the GIL. cpu_s: that the
    process has used, all threads. state: R, S, D, T or Z as /proc has it, "" where it is not told
    or the process is gone. wchan: where the main thread sleeps in the kernel, "" where not told.
    gpu_percent: the share of the last second in which any kernel ran on the device, a spinning one
    as well.
    """

    t: float
    rank: int
    p: P
    beats: int = 0
    cpu_s: float = 0.0
    state: str = ""
    wchan: str = ""
    rss_mib: float | None = None
    gpu_percent: float | None = None


@dataclass(frozen=True)
class Look:
    """Every thread's stack at one moment, by one tool.

    threads: {"name", "main", "active", "gil", "frames": ["file:line function", ...]}, innermost
    frame first; active and gil are None where the tool does not tell. "proc" tells no frames, but
    "state", "wchan" and "cpu_s" of each, as the kernel has them. p: the rank's coordinate at
    that moment. message: why there are no threads, where there are none.
    """

    t: float
    rank: int
    tool: str
    threads: list[dict[str, Any]] = field(default_factory=list)
    p: P | None = None
    message: str = ""

    def main(self) -> dict[str, Any] | None:
        """The main thread, where it was seen."""
        return next((thread for thread in self.threads if thread.get("main")), None)


@dataclass(frozen=True)
class End:
    """How it ended.

    how: one of ENDS. type: the exception's class, the signal's name, or one of REASONS when the
    supervisor stopped it. first_rank: the first to fail, None where none did or it is not known.
    out_of_memory: "", "device" or "host". peak_mib: of the device, or of the host where none is
    used.
    """

    how: str
    returncode: int | None = None
    type: str = ""
    message: str = ""
    traceback: str = ""
    first_rank: int | None = None
    out_of_memory: str = ""
    peak_mib: float | None = None


@dataclass
class Evidence:
    """All that is known of one trial.

    spec, environment: what ran, and where. preflight: reasons not to trust it, empty when there is
    none. seconds: from its start to its end, start-up included. began_s: when its first step
    began, None where it never did. predicted_s: what its steps should take, None where nobody said;
    factor: by which its observers slow it. soft_s: when looks are taken first; deadline_s: when it
    has to end, both counted from began_s; stall_s: how long P may rest.
    samples, looks: in order of time, of all ranks. end: None while it runs. oracles: name to
    {"ok", "detail"}. flights: of each rank, what its Flight Recorder held. losses: of rank 0.
    witness: which implementations ran, None where not recorded. memory: at a stall on a GPU.
    result: what rank 0's subject made of its steps, None where it tells nothing.
    again: the rerun at twice the deadline. notes: what else a reader should know.
    """

    spec: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    preflight: list[str] = field(default_factory=list)
    seconds: float = 0.0
    began_s: float | None = None
    predicted_s: float | None = None
    factor: float = 1.0
    soft_s: float | None = None
    deadline_s: float | None = None
    stall_s: float = 5.0
    samples: list[Sample] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    end: End | None = None
    oracles: dict[str, dict[str, Any]] = field(default_factory=dict)
    flights: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    witness: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    again: Evidence | None = None
    notes: list[str] = field(default_factory=list)

    def ranks(self) -> list[int]:
        """Those of which there is a sample."""
        return sorted({sample.rank for sample in self.samples})

    def of(self, rank: int) -> list[Sample]:
        """The samples of one rank, in order of time."""
        return [sample for sample in self.samples if sample.rank == rank]

    def last(self, rank: int = 0) -> P:
        """How far the rank came."""
        seen = self.of(rank)
        return seen[-1].p if seen else P()

    def frozen_s(self, rank: int = 0) -> float:
        """How long the rank's P had rested at its last sample."""
        seen = self.of(rank)
        resting = list(takewhile(lambda sample: sample.p == seen[-1].p, reversed(seen)))
        return resting[0].t - resting[-1].t if resting else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which knows no NaN: losses that are not finite become their names."""
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Evidence:
        """What `to_dict` wrote, also after JSON. Names that are not known are passed over."""
        values = _known(cls, found)
        values["samples"] = [_made(Sample, x) for x in values.get("samples", ())]
        values["looks"] = [_made(Look, x) for x in values.get("looks", ())]
        values["flights"] = {int(k): v for k, v in (values.get("flights") or {}).items()}
        values["losses"] = [float(x) for x in values.get("losses", ())]
        if values.get("end") is not None:
            values["end"] = _made(End, values["end"])
        if values.get("again") is not None:
            values["again"] = cls.from_dict(values["again"])
        return cls(**values)


def thinned(samples: list[Sample]) -> list[Sample]:
    """Half of them: of every rank every other one, and each where its P or state changed."""
    kept, before, odd = [], {}, {}
    for sample in samples:
        last = before.get(sample.rank)
        changed = last is None or (last.p, last.state) != (sample.p, sample.state)
        odd[sample.rank] = not odd.get(sample.rank, False)
        if odd[sample.rank] or (changed and len(kept) < len(samples) * 3 // 4):
            kept.append(sample)
        before[sample.rank] = sample
    return kept


def _known(cls: type, found: dict[str, Any]) -> dict[str, Any]:
    return {f.name: found[f.name] for f in dataclasses.fields(cls) if f.name in found}


def _made(cls: type, found: dict[str, Any]) -> Any:
    values = _known(cls, found)
    if values.get("p") is not None:
        values["p"] = P(**_known(P, values["p"]))
    return cls(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
