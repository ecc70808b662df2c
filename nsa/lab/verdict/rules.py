"""From evidence to a verdict, rule by rule: the first that applies.

A timeout alone is never HANG. Work that moves is SLOW however late it is, and a trial that rests is
HANG only with a proof that it cannot go on, or after it has rested twice at the same place. A
verdict is a kind, the rule that applied, and what that rule read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nsa.lab.verdict import proofs
from nsa.lab.verdict.pace import moves, pace
from nsa.lab.verdict.stalls import Stall, place_of, stalls
from nsa.lab.watch.evidence import End, Evidence

KINDS = ("PASS", "FAIL", "SLOW", "HANG", "OOM", "CRASH", "FLAKY", "INVALID", "INCONCLUSIVE")


@dataclass(frozen=True)
class Verdict:
    """One of KINDS, and why.

    what: which sort, as "blocked" or "nan-grad". rule: the first rule that applied. because: what
    it read, in sentences. place: where, as far as another run of the same fault shows it too.
    numbers: what a table wants. signature: kind, what and place, equal for equal faults.
    """

    kind: str
    what: str = ""
    rule: str = ""
    because: tuple[str, ...] = ()
    place: str = ""
    numbers: dict[str, Any] = field(default_factory=dict, compare=False)
    signature: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is none of {', '.join(KINDS)}")
        object.__setattr__(self, "because", tuple(self.because))
        if not self.signature:
            at = f" at {self.place}" if self.place else ""
            object.__setattr__(self, "signature", self.label + at)

    @property
    def label(self) -> str:
        """HANG:blocked, PASS, ..."""
        return f"{self.kind}:{self.what}" if self.what else self.kind

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "what": self.what,
            "rule": self.rule,
            "because": list(self.because),
            "place": self.place,
            "numbers": dict(self.numbers),
            "signature": self.signature,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Verdict:
        """What `to_dict` wrote, also after JSON."""
        return cls(**{name: found[name] for name in cls.__dataclass_fields__ if name in found})


# Which of several broken oracles names the verdict: what explains the others comes first.
ORDER = (
    *("ranks", "finite", "arrival", "checkpoint", "backends", "graph", "census", "quadratic"),
    *("memory", "recompilations"),
)
SLOW_ONLY = "recompile"  # what is right and late
FAULTS = ("SIGSEGV", "SIGBUS")
DUMPING_S = 2.0  # between the beginning of a dump and the end that it brings
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def judge(evidence: Evidence) -> Verdict:
    """The verdict of one trial, by the first rule that applies.

    Of a trial that still runs (`end` None) as of its last sample: HANG only where it is proven, so
    that a supervisor may ask as often as it likes and end what it need not wait for.
    """
    for rule in (_untrusted, _ended, _returned, _silent, _proven, _moving, _resting):
        found = rule(evidence)
        if found is not None:
            return found
    raise AssertionError("the last rule applies to everything")


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
    if end.how == "signal" and end.type in FAULTS and _was_dumping(evidence):
        why = (
            f"{end.type} while faulthandler wrote its stacks, which reads threads that run; with "
            "py-spy installed, and allowed to ptrace, it is not asked"
        )
        return Verdict("INCONCLUSIVE", "tool-crash", "an observer crashed", [why])
    if end.how == "stopped by the supervisor" and end.type == "caller":
        why = f"it was stopped after {evidence.seconds:.1f} s: {end.message or 'somebody asked'}"
        return Verdict("INCONCLUSIVE", "stopped-early", "stopped by its caller", [why])
    return None


def _was_dumping(evidence: Evidence) -> bool:
    last = max((x.t for x in evidence.looks if x.tool == "faulthandler"), default=-math.inf)
    return evidence.seconds - last < DUMPING_S


def _ended(evidence: Evidence) -> Verdict | None:
    """By itself, and not well."""
    end = evidence.end
    if end is None:
        return None
    if end.out_of_memory:
        peak = [f"its peak was {end.peak_mib:,.0f} MiB"] if end.peak_mib is not None else []
        because = [f"{end.out_of_memory} memory: {end.message or end.type}", *peak]
        return Verdict("OOM", end.out_of_memory, "out of memory", because,
                       numbers={"peak_mib": end.peak_mib})  # fmt: skip
    if end.how not in ("exception", "signal", "exit"):
        return None
    what = end.type or (f"exit {end.returncode}" if end.how == "exit" else end.how)
    because = [f"it ended by {end.how}: {end.message or what}"]
    if end.first_rank is not None:
        because.append(f"rank {end.first_rank} was the first to fail")
    place = _raised_at(end) or _last_place(evidence, end.first_rank)
    if place:
        because.append(f"at {place}")
    return Verdict("CRASH", what, "ended by itself before its steps were done", because, place)


def _returned(evidence: Evidence) -> Verdict | None:
    if evidence.end is None or evidence.end.how != "returned":
        return None
    steps, done = int(evidence.spec.get("steps") or 0), _steps_done(evidence)
    if done is not None and done < steps:
        because = [f"it returned after {done} of {steps} steps"]
        return Verdict("CRASH", "early-return", "ended by itself before its steps were done",
                       because)  # fmt: skip
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
        kind = "SLOW" if what == SLOW_ONLY and not bad else "FAIL"
        rule = "an oracle is broken" if kind == "FAIL" else "right, and late by its own doing"
        return Verdict(kind, what, rule, said, first.get("place", ""), {"broken": broken})
    if bad:
        return Verdict("FAIL", "nan-loss", "a loss is not finite", said)
    return _passed(evidence, steps)


def _passed(evidence: Evidence, steps: int) -> Verdict:
    held = [name for name, r in evidence.oracles.items() if r.get("ok")]
    because = [f"{steps} of {steps} steps" if steps else "it returned"]
    because.append(f"oracles that hold: {', '.join(held)}" if held else "no oracle was asked")
    because += [
        f"{name} could not tell: {r.get('detail', '')}"
        for name, r in evidence.oracles.items()
        if r.get("ok") is None
    ]
    seconds = _worked_s(evidence)
    late = seconds > (evidence.soft_s or math.inf)
    if late:
        because.append(f"late: {seconds:.1f} s, its soft deadline was {evidence.soft_s:.1f} s")
    return Verdict("PASS", "", "returned, and every oracle holds", because,
                   numbers={"late": late, "seconds": seconds})  # fmt: skip


def _silent(evidence: Evidence) -> Verdict | None:
    """Nothing was ever heard of it, so that nothing can be said to have stopped."""
    heard = any(s.beats or s.p.phases or s.p.step >= 0 for s in evidence.samples)
    if heard or any(s.state == "T" for s in evidence.samples):
        return None
    because = [f"no sign of life in {evidence.seconds:.1f} s: neither a beat nor a step"]
    return Verdict("INCONCLUSIVE", "no-heartbeat", "no heartbeat ever", because)


def _proven(evidence: Evidence) -> Verdict | None:
    proof = proofs.find(evidence)
    if proof is None or _came_further(evidence, proof.rest):
        return None
    because = [*_rested(proof.rest), *proof.because, *_elsewhere(evidence)]
    return _hang(proof.what, "rests, with a proof that it cannot go on", because, proof.rest)


def _came_further(evidence: Evidence, rest: Stall) -> bool:
    """A rerun that went on past the place disproves what looked proven."""
    again = evidence.again
    return again is not None and not again.preflight and again.last(rest.rank).after(rest.p)


def _moving(evidence: Evidence) -> Verdict | None:
    """Not at rest, and no proof: slow, or nothing to say yet."""
    seen = [rest for rest in stalls(evidence) if not rest.gone]
    rerun = evidence.again is not None  # then that decides, of what rested for any time at all
    if seen and all(rest.seconds > (evidence.stall_s if rerun else rest.bound) for rest in seen):
        return None
    numbers = pace(evidence)
    late = _worked_s(evidence) > (evidence.soft_s or math.inf)
    cut = evidence.end is not None and evidence.end.type == "deadline"
    mover = min(seen, key=lambda rest: rest.seconds)
    count = moves(evidence.of(mover.rank))
    because = [f"it moves: {count} changes of P were seen, the last to {mover.p}"]
    if not count:
        because = [f"stopped after {evidence.seconds:.1f} s, too soon to see anything move"]
        return Verdict("INCONCLUSIVE", "too-short", "nothing had moved yet", because)
    if not late and not cut:
        if evidence.end is None:
            return Verdict("INCONCLUSIVE", "running", "it is not late", because, numbers=numbers)
        because.append("it was stopped, though it was not late")
        return Verdict("INCONCLUSIVE", "unproven", "stopped without need", because)
    return Verdict("SLOW", "", "moves, and is late", because + _late(evidence, numbers),
                   numbers=numbers)  # fmt: skip


def _resting(evidence: Evidence) -> Verdict:
    """At rest without a proof that holds: only a rerun at twice the deadline decides."""
    rest = min(stalls(evidence), key=lambda rest: (rest.p.key(), rest.rank))  # others may wait
    because = _rested(rest)
    again = evidence.again
    if again is None:
        because.append("nothing proves that it cannot go on; a rerun at twice the deadline decides")
        return Verdict("INCONCLUSIVE", "unproven", "rests, without a proof", because, rest.place())
    second = judge(again)
    if second.kind != "INCONCLUSIVE" or again.preflight:
        told = f"the rerun at twice the deadline: {second.label}"
        return Verdict(second.kind, second.what, f"rerun: {second.rule}",
                       [*because, told, *second.because], second.place, second.numbers)  # fmt: skip
    first_p, second_p = evidence.last(rest.rank), again.last(rest.rank)
    if second_p.after(first_p):
        because.append(f"the rerun at twice the deadline came further: {second_p}")
        numbers = pace(again)
        return Verdict("SLOW", "", "came further when it was given longer",
                       because + _late(again, numbers), numbers=numbers)  # fmt: skip
    if second_p.key() != first_p.key() or second.what != "unproven":
        because.append(f"the rerun at twice the deadline ended elsewhere: {second_p}")
        return Verdict("INCONCLUSIVE", "unproven", "two runs, two places", because, rest.place())
    because.append("the rerun at twice the deadline ended at the same P")
    what = "blocked" if rest.idle else "unproven-native"
    return _hang(what, "the same P at once and at twice the deadline", because, rest)


def _hang(what: str, rule: str, because: list[str], rest: Stall) -> Verdict:
    numbers = {"rank": rest.rank, "step": rest.p.step, "rested_s": rest.seconds, "cpu": rest.cpu,
               "since_s": rest.since, "p": str(rest.p)}  # fmt: skip
    return Verdict("HANG", what, rule, because, rest.place(), numbers)


def _rested(rest: Stall) -> list[str]:
    return [
        f"rank {rest.rank} rests at {rest.p}",
        f"for {rest.seconds:.1f} s, in {rest.seen} samples; {rest.bound:.1f} s are allowed",
    ]


def _elsewhere(evidence: Evidence) -> list[str]:
    """The invariance that is published with a HANG: P at twice the deadline, where there is one."""
    if evidence.again is None:
        return []
    return [f"the rerun at twice the deadline ended at {evidence.again.last()}"]


def _late(evidence: Evidence, numbers: Mapping[str, float | None]) -> list[str]:
    lines = []
    if evidence.soft_s is not None:
        lines.append(
            f"{_worked_s(evidence):.1f} s since its first step began, its soft deadline was "
            f"{evidence.soft_s:.1f} s"
        )
    if numbers.get("fraction") is not None:
        lines.append(f"about {numbers['fraction']:.0%} of its steps are done")
    if numbers.get("eta_s") is not None:
        lines.append(f"about {numbers['eta_s']:,.0f} s are left at this rate")
    if numbers.get("ratio") is not None:
        lines.append(f"{numbers['ratio']:.1f} x its prediction")
    return lines


def _worked_s(evidence: Evidence) -> float:
    """Since its first step began, as the deadlines count; until its last sign of life."""
    alive = [s.t for s in evidence.samples if s.state]
    until = max(alive) if alive and evidence.end is not None else evidence.seconds
    return max(0.0, (until or evidence.seconds) - (evidence.began_s or 0.0))


def _steps_done(evidence: Evidence) -> int | None:
    """None where nothing told."""
    told = (evidence.result or {}).get("steps")
    if told is not None:
        return int(told)
    return len(evidence.losses) or None


def _raised_at(end: End) -> str:
    frames = [f"{file}:{line} {name}" for file, line, name in _FRAME.findall(end.traceback)]
    return place_of(frames[::-1])


def _last_place(evidence: Evidence, rank: int | None) -> str:
    return evidence.last(rank or 0).phase if evidence.samples else ""
