"""Judge evidence by the first rule that applies.

A timeout alone is never HANG. Work that moves is SLOW however late it is; work at rest is HANG only
with a certificate that nobody is left who could end its wait, STALLED if somebody might, SLOW
while anybody works. A verdict is a kind, the rule that applied, and the evidence for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from whyhung.verdict.collectives import unlike
from whyhung.verdict.idle import idle
from whyhung.verdict.pace import moves, pace
from whyhung.verdict.rests import Rest, bound_s, rests
from whyhung.verdict.stalls import Stall, named, place_of, stall
from whyhung.verdict.standing import cut_short, remembered, standing, without_timers
from whyhung.watch.evidence import OUTSIDE, Evidence

KINDS = (
    "PASS", "FAIL", "SLOW", "STALLED", "HANG", "OOM", "CRASH", "FLAKY", "INVALID", "INCONCLUSIVE",
)  # fmt: skip
_LISTS = ("because", "edges", "unknown", "settle")


@dataclass(frozen=True)
class Verdict:
    """One of KINDS, with the reasons."""

    kind: str
    what: str = ""  # subkind, as "lock" or "nan-grad"
    rule: str = ""  # the first rule that applied
    because: tuple[str, ...] = ()  # evidence that it read, in sentences
    place: str = ""  # location, as far as other runs of the same fault share it
    numbers: dict[str, Any] = field(default_factory=dict, compare=False)  # for tables
    signature: str = ""  # kind, what and place, equal for equal faults
    # For the page of a stall:
    line: str = field(default="", compare=False)  # the user's own: "train.py:31 evaluate"
    edges: tuple[dict[str, Any], ...] = field(default=(), compare=False)  # see verdict.graph.edge
    unknown: tuple[str, ...] = field(default=(), compare=False)  # facts that could not be seen
    settle: tuple[str, ...] = field(default=(), compare=False)  # commands that would reveal more

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is none of {', '.join(KINDS)}")
        for name in _LISTS:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.signature:
            at = f" at {self.place}" if self.place else ""
            object.__setattr__(self, "signature", self.label + at)

    @property
    def label(self) -> str:
        """Kind and subkind: "HANG:lock", "PASS", ..."""
        return f"{self.kind}:{self.what}" if self.what else self.kind

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {name: list(getattr(self, name)) for name in _LISTS}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Verdict:
        """Return the Verdict written by `to_dict`, also after JSON."""
        return cls(**{name: found[name] for name in cls.__dataclass_fields__ if name in found})


# Order in which broken oracles name the verdict: one that explains others comes first.
ORDER = (
    *("ranks", "finite", "explosion", "arrival", "optimizers", "checkpoint", "backends", "graph"),
    *("census", "quadratic", "memory", "plateau", "recompilations", "duration"),
)
SLOW_ONLY = ("recompile", "growing")  # correct, but late
UNDONE = "ended by itself before its steps were done"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def judge(evidence: Evidence) -> Verdict:
    """Return the verdict of one trial, by the first rule that applies.

    A trial that still runs (`end` None) is judged as of its last sample: HANG only if certified,
    so that a supervisor may call this at any time and end a trial that it need not wait for.
    """
    for rule in (_untrusted, _cut_short, _ended, _returned, _stands, _silent, _moving):
        found = rule(evidence)
        if found is not None:
            return found
    return _resting(evidence)


def _untrusted(evidence: Evidence) -> Verdict | None:
    if evidence.preflight:
        return Verdict("INCONCLUSIVE", "preflight", "preflight failed", evidence.preflight)
    end = evidence.end
    if end is None:
        return None
    variables = {**evidence.environment, **evidence.environment.get("env", {})}
    variables |= evidence.spec.get("env", {})
    detail = variables.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL"
    if detail and end.how == "signal" and end.type == "SIGSEGV":
        why = "TORCH_DISTRIBUTED_DEBUG=DETAIL itself ends in SIGSEGV with some versions; use INFO"
        return Verdict("INCONCLUSIVE", "tool-crash", "an observer crashed", [why])
    if end.how == "stopped by the supervisor" and end.type == "caller":
        found = stall(evidence)
        if found is not None and found.state == "certified":
            return None  # whoever ended it, it could not have gone on
        why = f"it was stopped after {evidence.seconds:.1f} s: {end.message or 'somebody asked'}"
        told = (standing(evidence) or {}).get("headline")
        said = [f"told before: {told}"] if told else []
        return Verdict("INCONCLUSIVE", "stopped-early", "stopped by its caller", [why, *said])
    return None


def _cut_short(evidence: Evidence) -> Verdict | None:
    """Return the verdict of a run that a signal ended while it stood, as it stood then."""
    if not cut_short(evidence):
        return None
    found, told = _stands(evidence), standing(evidence)
    if found is None or found.label != told["label"]:  # changes by the signal were seen, too
        found = Verdict(place=named(told["line"]), **remembered(told))
    return replace(found, because=(*found.because, evidence.end.message))


def _ended(evidence: Evidence) -> Verdict | None:
    """Return the verdict of a trial that ended by itself and failed."""
    end = evidence.end
    if end is None:
        return None
    if end.out_of_memory:
        because = [f"{end.out_of_memory} memory: {end.message or end.type}"]
        if end.peak_mib is not None:
            because.append(f"its peak was {end.peak_mib:,.0f} MiB")
        numbers = {"peak_mib": end.peak_mib}
        return Verdict("OOM", end.out_of_memory, "out of memory", because, numbers=numbers)
    if end.how not in ("exception", "signal", "exit"):
        return None
    what = end.type or (f"exit {end.returncode}" if end.how == "exit" else end.how)
    because = [f"it ended by {end.how}: {end.message or what}"]
    if end.first_rank is not None:
        because.append(f"rank {end.first_rank} was the first to fail")
    because += unlike(evidence)
    frames = [f"{file}:{line} {name}" for file, line, name in _FRAME.findall(end.traceback)]
    place = place_of(frames[::-1])
    if not place and evidence.samples:
        place = evidence.last(end.first_rank or 0).phase.replace(OUTSIDE, "")
    if place:
        because.append(f"at {place}")
    return Verdict("CRASH", what, UNDONE, because, place)


def _returned(evidence: Evidence) -> Verdict | None:
    if evidence.end is None or evidence.end.how != "returned":
        return None
    steps, told = int(evidence.spec.get("steps") or 0), (evidence.result or {}).get("steps")
    done = int(told) if told is not None else len(evidence.losses) or steps
    if done < steps:
        because = [f"it returned after {done} of {steps} steps"]
        return Verdict("CRASH", "early-return", UNDONE, because)
    broken = sorted(
        (name for name, r in evidence.oracles.items() if r.get("ok") is False),
        key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name),
    )
    bad = [i for i, loss in enumerate(evidence.losses) if not math.isfinite(loss)]
    said = [f"{name}: {evidence.oracles[name].get('detail', 'broken')}" for name in broken]
    if bad:
        said.append(f"the loss of step {bad[0]} is {evidence.losses[bad[0]]}")
    if broken:
        first = evidence.oracles[broken[0]]
        what = first.get("what") or broken[0]
        kind, rule = "FAIL", "an oracle is broken"
        if what in SLOW_ONLY and not bad:
            kind, rule = "SLOW", "right, and late by its own doing"
        return Verdict(kind, what, rule, said, first.get("place", ""), {"broken": broken})
    if bad:
        return Verdict("FAIL", "nan-loss", "a loss is not finite", said)
    held = [name for name, r in evidence.oracles.items() if r.get("ok")]
    because = [
        f"{steps} of {steps} steps" if steps else "it returned",
        f"oracles that hold: {', '.join(held)}" if held else "no oracle was asked",
    ]
    because += [
        f"{name} could not tell: {r.get('detail', '')}"
        for name, r in evidence.oracles.items()
        if r.get("ok") is None
    ]
    because += [
        f"hint: {name}: {r['hint']}" for name, r in evidence.oracles.items() if r.get("hint")
    ]
    numbers = {"late": _is_late(evidence), "seconds": _worked_s(evidence)}
    if numbers["late"]:
        late, soft_s = numbers["seconds"], evidence.soft_s
        because.append(f"late: {late:.1f} s, its soft deadline was {soft_s:.1f} s")
    return Verdict("PASS", "", "returned, and every oracle holds", because, numbers=numbers)


def _silent(evidence: Evidence) -> Verdict | None:
    """Return INCONCLUSIVE if it never gave a sign of life, so that nothing can have stopped."""
    heard = any(s.beats or s.p.phases or s.p.events or s.p.step >= 0 for s in evidence.samples)
    if heard or any(s.state == "T" for s in evidence.samples):
        return None
    because = [f"no sign of life in {evidence.seconds:.1f} s: neither a beat nor a step"]
    return Verdict("INCONCLUSIVE", "no-heartbeat", "no heartbeat ever", because)


_STATES = {
    "certified": ("HANG", "waits, and nobody is left who could end that"),
    "waiting": ("STALLED", "waits quietly for what may still come"),
    "busy": ("SLOW", "makes no progress that is counted, and somebody works"),
    "timer": ("SLOW", "waits for a timer that ends by itself"),
}


def _stands(evidence: Evidence) -> Verdict | None:
    """Return the verdict if progress rests and looks were taken meanwhile."""
    found = stall(evidence)
    if found is None:
        return None
    rest, (kind, rule) = found.rest, _STATES[found.state]
    because, edges = [*found.because, *_rested(rest)], found.edges
    if kind == "HANG":
        because, edges = without_timers(because, edges)
    quiet = found.state in ("waiting", "timer")
    if quiet and (asked := idle(evidence.snapshots[-1].of(rest.rank), rest.p)):
        because.insert(0, f"rank {rest.rank} {asked}")
        return Verdict("INCONCLUSIVE", "idle", "waits to be asked", because, line=found.line)
    if evidence.end is not None and evidence.end.type == "deadline":
        because.append(f"its limit ended it: {evidence.end.message}")
        because += _late(evidence, {})
    numbers = {
        **{"rank": rest.rank, "step": rest.p.step, "rested_s": rest.seconds, "since_s": rest.since},
        **{"p": str(rest.p), "where": found.where, "pid": found.pid, "left_s": found.left_s},
        **{"longest_s": rest.longest, "bound_s": bound_s(rest), "late": _is_late(evidence)},
    }
    phase = "" if rest.p.phase == OUTSIDE else rest.p.phase
    place = ", ".join(filter(None, (phase, named(found.line))))
    return Verdict(kind, found.what, rule, because, place, numbers, line=found.line,
                   edges=edges, unknown=found.unknown, settle=_settle(found))  # fmt: skip


def _settle(found: Stall) -> list[str]:
    """Return commands that would reveal more about the stall."""
    if not found.pid or found.state == "timer":
        return []
    commands = [f"py-spy dump --native --pid {found.pid}"]
    more = {
        "socket": f"ss -tnp | grep pid={found.pid}",
        "file lock": "cat /proc/locks",
        "device": f"cuda-gdb --pid {found.pid} -batch -ex 'info cuda kernels'",
        "collective": "TORCH_FR_BUFFER_SIZE=2000 and `whyhung watch`: every rank's collectives",
        "stopped": f"kill -CONT {found.pid}",
        "polling": f"strace -f -e trace=file -p {found.pid}",
    }
    return [*commands, more[found.what]] if found.what in more else commands


def _moving(evidence: Evidence) -> Verdict | None:
    """Return the verdict if not at rest: slow, or nothing to report yet."""
    seen = [rest for rest in rests(evidence) if not rest.gone]
    if seen and all(rest.seconds > evidence.stall_s for rest in seen):
        return None
    numbers = pace(evidence)
    cut = evidence.end is not None and evidence.end.type == "deadline"
    mover = min(seen, key=lambda rest: rest.seconds) if seen else None
    count = moves(evidence.of(mover.rank)) if mover else 0
    if not count:
        because = [f"stopped after {evidence.seconds:.1f} s, too soon to see anything move"]
        return Verdict("INCONCLUSIVE", "too-short", "nothing had moved yet", because)
    because = [f"it moves: {count} changes of its progress were seen, the last to {mover.p}"]
    if _is_late(evidence) or cut:
        because += _late(evidence, numbers)
        return Verdict("SLOW", "", "moves, and is late", because, numbers=numbers)
    if evidence.end is None:
        return Verdict("INCONCLUSIVE", "running", "it is not late", because, numbers=numbers)
    because.append("it was stopped, though it was not late")
    return Verdict("INCONCLUSIVE", "not-late", "stopped without need", because, numbers=numbers)


def _resting(evidence: Evidence) -> Verdict:
    """Return the verdict if at rest too briefly to know why, or not looked at."""
    rest = min(rests(evidence), key=lambda rest: (rest.p.key(), rest.rank))  # others may wait
    because = [*_rested(rest), "too few looks were taken to tell why"]
    return Verdict("INCONCLUSIVE", "few-looks", "stands, and was looked at too little", because)


def _rested(rest: Rest) -> list[str]:
    if rest.p.phase == OUTSIDE:
        return [
            f"so it was seen for {rest.seconds:.1f} s; nothing counts rank {rest.rank}'s progress"
        ]
    return [
        f"rank {rest.rank} has made no progress for {rest.seconds:.1f} s, at {rest.p}",
        f"its longest silence before was {rest.longest:.1f} s" if rest.longest else
        "no silence was seen before, its first step left out",
    ]  # fmt: skip


def _late(evidence: Evidence, numbers: Mapping[str, float | None]) -> list[str]:
    lines = []
    if evidence.soft_s is not None:
        worked_s, soft_s = _worked_s(evidence), evidence.soft_s
        since = f"{worked_s:.1f} s since its first step began"
        lines.append(f"{since}, its soft deadline was {soft_s:.1f} s")
    told = {
        "fraction": "about {:.0%} of its steps are done",
        "eta_s": "about {:,.0f} s are left at this rate",
        "ratio": "{:.1f} x its prediction",
    }
    known = {name: numbers[name] for name in told if numbers.get(name) is not None}
    return lines + [told[name].format(number) for name, number in known.items()]


def _is_late(evidence: Evidence) -> bool:
    return _worked_s(evidence) > (evidence.soft_s or math.inf)


def _worked_s(evidence: Evidence) -> float:
    """Return seconds since its first step began, as for deadlines, until its last sign of life."""
    alive = [s.t for s in evidence.samples if s.state]
    until = max(alive) if alive and evidence.end is not None else evidence.seconds
    return max(0.0, (until or evidence.seconds) - (evidence.began_s or 0.0))
