"""Page of a verdict and its evidence: for a terminal, or as markdown for a notebook.

First what happened and at which line of the user's, then who waits for whom, then all the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

from whyhung.verdict import family, picture
from whyhung.verdict.frames import nearest
from whyhung.verdict.headline import headline
from whyhung.verdict.pace import fraction
from whyhung.verdict.picture import WIDTH, clipped, seconds
from whyhung.verdict.rules import Verdict, judge
from whyhung.watch.evidence import OUTSIDE, End, Evidence, P, Sample

STRIP_WIDTH = 60
ROWS = 8  # rows of progress
OUTPUT = 12  # lines
BARS = " ▁▂▃▄▅▆▇█"
UNCOUNTED = ("SLOW:uncounted", "SLOW:timer")
TEACH = (
    "if that silence is healthy work: stall_s=N allows N seconds of it, and a call of "
    "whyhung.watch.event() in it, now and then, counts as progress"
)


def page(
    evidence: Evidence, verdict: Verdict | None = None, *, name: str = "", markdown: bool = False
) -> str:
    """Return what happened, who waits for whom, and the evidence; `verdict` None: judge now.

    name: the trial's id. Lines of a terminal's page have at most 100 characters.
    """
    verdict = judge(evidence) if verdict is None else verdict
    parts = sections(evidence, verdict)
    return (
        _markdown(evidence, verdict, name, parts)
        if markdown
        else _text(evidence, verdict, name, parts)
    )


@dataclass
class Section:
    """Title with lines, a table (its first row has the headings), or verbatim text under it."""

    title: str
    lines: list[str] = field(default_factory=list)
    table: list[list[str]] = field(default_factory=list)
    verbatim: list[str] = field(default_factory=list)


def sections(evidence: Evidence, verdict: Verdict) -> list[Section]:
    """Return all sections that are not empty."""
    seen = family.told(evidence)
    output = [clipped(line.rstrip(), WIDTH - 2) for line in evidence.output]
    made = [
        Section("Who waits for whom", verbatim=picture.text(verdict.edges)),
        Section("Why", [why for why in verdict.because if why not in headline(evidence, verdict)]),
        Section("Processes and threads", verbatim=seen),
        Section("Last lines of its output", verbatim=output[-OUTPUT:]),
        Section("What would settle it", _teach(evidence, verdict), verbatim=list(verdict.settle)),
        Section("What is not known", _unknown(evidence, verdict)),
        _ended(evidence),
        _progress(evidence),
        Section("Last collectives", table=_collectives(evidence)),
        Section("Checks", table=_oracles(evidence)),
        Section("Losses", _losses(evidence.losses)),
        Section("Rerun for twice as long", table=_rerun(evidence)),
        Section("What ran", table=_ran(evidence)),
        Section("Notes", [*evidence.preflight, *evidence.notes]),
    ]  # fmt: skip
    # a table of headings alone is empty
    return [part for part in made if part.lines or part.table[1:] or part.verbatim]


def _teach(evidence: Evidence, verdict: Verdict) -> list[str]:
    """Return how to declare that this silence is healthy."""
    if "attached" in evidence.spec:
        return []
    if verdict.kind != "STALLED" and verdict.label not in UNCOUNTED:
        return []
    longest = verdict.numbers.get("longest_s")
    before = f"; its longest before was {seconds(longest)}" if longest else ""
    allowed = verdict.numbers.get("bound_s") or evidence.stall_s
    return [f"{TEACH} (allowed now: {seconds(allowed)}{before})"]


def _unknown(evidence: Evidence, verdict: Verdict) -> list[str]:
    """Return facts unknown to the verdict, and which processes could not be read and why."""
    last = {p.pid: p for s in evidence.snapshots if s.full for p in s.processes}
    messages: dict[str, list[int]] = {}
    for process in last.values():
        if process.message:
            messages.setdefault(process.message, []).append(process.pid)
    told = [said for said in verdict.unknown if said not in messages]
    for message, pids in messages.items():
        whose = ", ".join(f"process {pid}" for pid in pids[:3] if pid)
        more = f" and {len(pids) - 3} more" if len(pids) > 3 else ""
        told.append(f"{whose}{more}: {message}" if whose else message)
    return told


def _ran(evidence: Evidence) -> list[list[str]]:
    spec, environment = evidence.spec, evidence.environment
    rows = [["what", "value"]]
    for name in ("subject", "command", "attached", "argv", "steps", "ranks", "seed", "python"):
        if spec.get(name) is not None:
            rows.append([name, str(spec[name])])
    for name in ("settings", "env"):
        if spec.get(name):
            rows.append([name, ", ".join(_flat(spec[name]))])
    for name in ("observers", "oracles"):
        if spec.get(name):
            rows.append([name, ", ".join(map(str, spec[name]))])
    told = {k: v for k, v in environment.items() if isinstance(v, str | int | float) and v != ""}
    if told:
        rows.append(["environment", ", ".join(_flat(told))])
    limits = {
        "predicted": evidence.predicted_s,
        "late after": evidence.soft_s,
        "deadline": evidence.deadline_s,
        "longest silence allowed": evidence.stall_s,
    }
    said = ", ".join(f"{name} {s:.3g} s" for name, s in limits.items() if s is not None)
    slowed = f"; observers slow it {evidence.factor:.2g} x" if evidence.factor != 1 else ""
    return [*rows, ["times", said + slowed]]


def _flat(found: dict[str, Any], before: str = "") -> Iterator[str]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}={value}"


def _ended(evidence: Evidence) -> Section:
    end = evidence.end
    if end is None:
        return Section(
            "How it ended",
            [] if "attached" in evidence.spec else [f"it still ran after {evidence.seconds:.1f} s"],
        )
    lines = [_how(end) + (f": {end.message}" if end.message else "")]
    lines.append(f"after {evidence.seconds:.1f} s")
    if end.returncode is not None:
        lines.append(f"return code {end.returncode}")
    if end.peak_mib is not None:
        lines.append(f"peak {end.peak_mib:,.0f} MiB")
    tail = [clipped(line, WIDTH - 2) for line in end.traceback.rstrip().splitlines()[-12:]]
    return Section("How it ended", lines, verbatim=tail)


def _how(end: End) -> str:
    return f"{end.how} ({end.type})" if end.type else end.how


def strip(samples: list[Sample], steps: int, seconds: float, width: int = STRIP_WIDTH) -> str:
    """Return a bar chart of the work done over time: a slope is slow, flat is not moving."""
    heights, at, done = [], 0, 0.0
    top = max((fraction(s.p, steps) for s in samples), default=0.0) or 1.0
    for column in range(width):
        while at < len(samples) and samples[at].t <= seconds * (column + 1) / width:
            done, at = fraction(samples[at].p, steps), at + 1
        heights.append(BARS[round(done / top * (len(BARS) - 1))])
    return "".join(heights)


def where(p: P) -> str:
    """Return a progress coordinate in words: "step 5, backward, node 12 of 96"."""
    if p.phase == OUTSIDE:
        return str(p)
    told = [f"step {p.step}" if p.step >= 0 else "before the first step", p.phase]
    told += [f"{p.modules} modules done"] if p.modules else []
    told += [f"node {p.fired} of {p.total}"] if p.total else []
    told += [f"{p.events} events"] if p.events else []
    return ", ".join([*told, *([f"{p.collectives} collectives"] if p.collectives else [])])


def _progress(evidence: Evidence) -> Section:
    table = [["time", "rank", "where", "CPU", "Python alive", "state"]]
    verbatim = []
    steps = int(evidence.spec.get("steps") or 1)
    last_t = max((s.t for s in evidence.samples), default=0.0)
    ranks = evidence.ranks()
    for rank in ranks[:ROWS]:
        samples = [s for s in evidence.of(rank) if s.state] or evidence.of(rank)
        bars = strip(samples, steps, last_t)
        verbatim.append(clipped(f"rank {rank} |{bars}| {last_t:.1f} s", WIDTH - 2))
        rows = ROWS if len(ranks) <= 2 else 2
        chosen = sorted({round(i * (len(samples) - 1) / (rows - 1)) for i in range(rows)})
        shown = [samples[index] for index in chosen]
        shown = [
            sample
            for sample, *beside in zip(shown, [None, *shown], [*shown[1:], None], strict=False)
            if any(other is None or other.p != sample.p for other in beside)
        ]
        for before, sample in zip([None, *shown], shown, strict=False):
            alive = cpu = ""
            if before is not None and sample.t > before.t:
                alive = "yes" if sample.beats > before.beats else "no" if sample.beats else ""
                cpu = f"{(sample.cpu_s - before.cpu_s) / (sample.t - before.t):.0%}"
            state = family.STATES.get(sample.state, sample.state)
            state += f" in {sample.wchan}" if sample.wchan.strip("0") else ""
            table.append([f"{sample.t:.1f} s", str(rank), where(sample.p), cpu, alive, state])
    if len(ranks) > ROWS:
        verbatim.append(f"and {len(ranks) - ROWS} more ranks")
    return Section("Progress", table=table, verbatim=verbatim)


def _collectives(evidence: Evidence) -> list[list[str]]:
    rows = [["rank", "number", "operation", "state", "sizes", "at"]]
    for rank, entries in sorted(evidence.flights.items()):
        for entry in entries[-3:]:
            told = [str(entry.get(name, "")) for name in ("seq", "op", "state", "sizes")]
            rows.append([str(rank), *told, nearest(entry.get("frames") or ())])
    return rows


def _oracles(evidence: Evidence) -> list[list[str]]:
    words = {True: "holds", False: "BROKEN"}
    rows = [["", "check", "what it saw"]]
    for name, told in evidence.oracles.items():
        rows.append([words.get(told.get("ok"), "?"), name, str(told.get("detail", ""))])
        if told.get("hint"):
            rows.append(["hint", name, str(told["hint"])])
    return rows


def _losses(losses: list[float]) -> list[str]:
    shown = [f"{loss:.4g}" for loss in losses]
    if len(shown) >= 7:
        shown = [*shown[:3], "...", *shown[-3:]]
    return [f"{len(losses)}: {', '.join(shown)}"] if losses else []


def _rerun(evidence: Evidence) -> list[list[str]]:
    """Return a table of its progress at the deadline, and at twice the deadline."""
    rows = [["run", "deadline", "seconds", "where it was", "ended by"]]
    if evidence.again is None:
        return rows
    for name, one in (("first", evidence), ("rerun", evidence.again)):
        deadline = "" if one.deadline_s is None else f"{one.deadline_s:.1f} s"
        how = "" if one.end is None else _how(one.end)
        places = "; ".join(where(one.last(rank)) for rank in one.ranks() or [0])
        rows.append([name, deadline, f"{one.seconds:.1f}", places, how])
    return rows


def _text(evidence: Evidence, verdict: Verdict, name: str, parts: list[Section]) -> str:
    lines = wrap(headline(evidence, verdict), WIDTH, subsequent_indent="  ")
    lines += wrap(_label(verdict, name), WIDTH, subsequent_indent="  ")
    for part in parts:
        lines += ["", part.title]
        for line in part.lines:
            lines += wrap(line, WIDTH, initial_indent="  - ", subsequent_indent="    ")
        lines += [f"  {line}".rstrip() for line in part.verbatim]
        lines += _columns(part.table)
    return "\n".join(lines) + "\n"


def _label(verdict: Verdict, name: str) -> str:
    """Return the label, rule, trial and place in one line, for programs to search."""
    told = [verdict.label, f"rule: {verdict.rule}" if verdict.rule else ""]
    told += [f"trial {name}" if name else "", f"place: {verdict.place}" if verdict.place else ""]
    return "; ".join(part for part in told if part)


def _columns(table: list[list[str]]) -> list[str]:
    """Return aligned lines; the last column of a wide table continues below itself."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
    last = sum(width + 2 for width in widths) + 2
    lines = []
    for row in table if len(table) > 1 else ():
        start = "  " + "".join(f"{c:<{w}}  " for c, w in zip(row[:-1], widths, strict=True))
        rest = wrap(row[-1], max(30, WIDTH - last)) or [""]
        lines.append((start + rest[0]).rstrip())
        lines += [" " * last + more for more in rest[1:]]
    return lines


def _markdown(evidence: Evidence, verdict: Verdict, name: str, parts: list[Section]) -> str:
    blocks = [f"### {_plain(headline(evidence, verdict))}", _plain(_label(verdict, name))]
    for part in parts:
        blocks.append(f"**{part.title}**")
        if part.lines:
            blocks.append("\n".join(f"- {_plain(line)}" for line in part.lines))
        if part.verbatim:
            blocks.append(_fenced(part.verbatim))
        if part.table[1:]:
            cells = [[_plain(cell.replace("|", "\\|")) for cell in row] for row in part.table]
            head, *rows = ["| " + " | ".join(row) + " |" for row in cells]
            blocks.append("\n".join([head, f"|{'|'.join('---' for _ in cells[0])}|", *rows]))
    return "\n\n".join(blocks) + "\n"


def _fenced(lines: list[str]) -> str:
    fence = "`" * max(3, 1 + max(len(ticks) for ticks in re.findall("`*", "\n".join(lines))))
    return "\n".join([f"{fence}text", *lines, fence])


def _plain(text: str) -> str:
    """Escape the characters that markdown would interpret, and join the lines."""
    for mark in ("*", "_", "<"):
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())
