"""A trial's verdict, its rule and its evidence as a page: for a terminal, or as markdown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from textwrap import wrap
from typing import Any

from nsa.lab.verdict.pace import fraction
from nsa.lab.verdict.rules import Verdict, judge
from nsa.lab.verdict.stalls import at_work
from nsa.lab.watch.evidence import End, Evidence, Look, Sample

STRIP_WIDTH = 60
WIDTH = 100
ROWS = 8  # of progress
FRAMES = 5
BARS = " ▁▂▃▄▅▆▇█"


def page(
    evidence: Evidence, verdict: Verdict | None = None, *, name: str = "", markdown: bool = False
) -> str:
    """Verdict, rule, what it read, progress, stacks, oracles, rerun; `verdict` None: judged now.

    name: the trial's id. Lines of a terminal's page have at most 100 characters, but for stacks.
    """
    verdict = judge(evidence) if verdict is None else verdict
    parts = sections(evidence, verdict)
    return _markdown(verdict, name, parts) if markdown else _text(verdict, name, parts)


@dataclass
class Section:
    """A title, and under it lines, a table (its first row are the headings), or verbatim text."""

    title: str
    lines: list[str] = field(default_factory=list)
    table: list[list[str]] = field(default_factory=list)
    verbatim: list[str] = field(default_factory=list)


def sections(evidence: Evidence, verdict: Verdict) -> list[Section]:
    """All that are not empty."""
    made = [
        Section("Why", list(verdict.because)),
        Section("What ran", table=_ran(evidence)),
        _ended(evidence),
        _progress(evidence),
        Section("Stacks", verbatim=_stacks(evidence)),
        Section("Last collectives", table=_collectives(evidence)),
        Section("Oracles", table=_oracles(evidence)),
        Section("Losses", _losses(evidence.losses)),
        Section("Rerun for twice as long", table=_rerun(evidence)),
        Section("The last lines that it printed", verbatim=list(evidence.output)),
        Section("Notes", [*evidence.preflight, *evidence.notes]),
    ]
    # a table of headings alone is empty
    return [part for part in made if part.lines or part.table[1:] or part.verbatim]


def _ran(evidence: Evidence) -> list[list[str]]:
    spec, environment = evidence.spec, evidence.environment
    rows = [["what", "value"]]
    for name in ("subject", "steps", "ranks", "seed", "python"):
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
        "soft deadline": evidence.soft_s,
        "deadline": evidence.deadline_s,
        "P may rest": evidence.stall_s,
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
        return Section("How it ended", [f"it still ran after {evidence.seconds:.1f} s"])
    lines = [_how(end) + (f": {end.message}" if end.message else "")]
    lines.append(f"after {evidence.seconds:.1f} s")
    if end.returncode is not None:
        lines.append(f"return code {end.returncode}")
    if end.peak_mib is not None:
        lines.append(f"peak {end.peak_mib:,.0f} MiB")
    return Section("How it ended", lines, verbatim=end.traceback.rstrip().splitlines()[-12:])


def _how(end: End) -> str:
    return f"{end.how} ({end.type})" if end.type else end.how


def strip(samples: list[Sample], steps: int, seconds: float, width: int = STRIP_WIDTH) -> str:
    """How much was done, along time: a slope is slow, flat is not moving."""
    heights, at, done = [], 0, 0.0
    top = max((fraction(s.p, steps) for s in samples), default=0.0) or 1.0
    for column in range(width):
        while at < len(samples) and samples[at].t <= seconds * (column + 1) / width:
            done, at = fraction(samples[at].p, steps), at + 1
        heights.append(BARS[round(done / top * (len(BARS) - 1))])
    return "".join(heights)


def _progress(evidence: Evidence) -> Section:
    table = [["t", "rank", "P", "beats/s", "core", "state", "waits in"]]
    verbatim = []
    steps = int(evidence.spec.get("steps") or 1)
    last_t = max((s.t for s in evidence.samples), default=0.0)
    for rank in evidence.ranks():
        samples = [s for s in evidence.of(rank) if s.state] or evidence.of(rank)
        bars = strip(samples, steps, last_t)
        verbatim.append(f"rank {rank} |{bars}| {last_t:.1f} s, {samples[-1].p}")
        chosen = sorted({round(i * (len(samples) - 1) / (ROWS - 1)) for i in range(ROWS)})
        shown = [samples[index] for index in chosen]
        for before, sample in zip([None, *shown], shown, strict=False):
            beats = core = ""
            if before is not None and sample.t > before.t:
                beats = f"{(sample.beats - before.beats) / (sample.t - before.t):.1f}"
                core = f"{(sample.cpu_s - before.cpu_s) / (sample.t - before.t):.0%}"
            place = [f"{sample.t:.1f} s", str(rank), str(sample.p)]
            table.append([*place, beats, core, sample.state, sample.wchan])
    return Section("Progress", table=table, verbatim=verbatim)


def _stacks(evidence: Evidence) -> list[str]:
    """Looks one after the other that saw the same are told once."""
    told: list[str] = []
    ordered = sorted(evidence.looks, key=lambda x: (x.rank, x.tool))
    for (rank, tool), mine in groupby(ordered, key=lambda x: (x.rank, x.tool)):
        for words, same in groupby(sorted(mine, key=lambda x: x.t), key=_words):
            if not words:
                continue
            seen = list(same)
            times = f"{len(seen)} looks, {seen[0].t:.1f} to {seen[-1].t:.1f} s"
            when = times if len(seen) > 1 else f"{seen[0].t:.1f} s"
            told += [f"rank {rank}, {tool}, {when}", *(f"  {line}" for line in words)]
    return told


def _words(look: Look) -> tuple[str, ...]:
    shown = [t for t in look.threads if t.get("frames")]
    if not shown:
        return (f"no stack: {look.message}",) if look.message else ()
    thread = at_work(shown)
    holds = {True: ", has the GIL", False: ", without the GIL"}.get(thread.get("gil"), "")
    frames, more = thread["frames"][:FRAMES], len(thread["frames"]) - FRAMES
    rest = (f"  ... {more} more",) if more > 0 else ()
    return (f"{thread.get('name') or 'thread'}{holds}", *(f"  {f}" for f in frames), *rest)


def _collectives(evidence: Evidence) -> list[list[str]]:
    rows = [["rank", "number", "operation", "state", "sizes", "at"]]
    for rank, entries in sorted(evidence.flights.items()):
        for entry in entries[-3:]:
            told = [str(entry.get(name, "")) for name in ("seq", "op", "state", "sizes")]
            rows.append([str(rank), *told, *(entry.get("frames") or [""])[:1]])
    return rows


def _oracles(evidence: Evidence) -> list[list[str]]:
    words = {True: "holds", False: "BROKEN"}
    told = evidence.oracles.items()
    rows = [[words.get(x.get("ok"), "?"), name, str(x.get("detail", ""))] for name, x in told]
    return [["", "oracle", "what it saw"], *rows]


def _losses(losses: list[float]) -> list[str]:
    shown = [f"{loss:.4g}" for loss in losses]
    if len(shown) >= 7:
        shown = [*shown[:3], "...", *shown[-3:]]
    return [f"{len(losses)}: {', '.join(shown)}"] if losses else []


def _rerun(evidence: Evidence) -> list[list[str]]:
    """The invariance that is told with a rest: P at the deadline and at twice the deadline."""
    rows = [["run", "deadline", "seconds", "P at its end", "ended by"]]
    if evidence.again is None:
        return rows
    for name, one in (("first", evidence), ("rerun", evidence.again)):
        deadline = "" if one.deadline_s is None else f"{one.deadline_s:.1f} s"
        how = "" if one.end is None else _how(one.end)
        places = "; ".join(str(one.last(rank)) for rank in one.ranks() or [0])
        rows.append([name, deadline, f"{one.seconds:.1f}", places, how])
    return rows


def _text(verdict: Verdict, name: str, parts: list[Section]) -> str:
    head = f"{'trial ' + name if name else 'trial'}: {verdict.label}"
    lines = [head, f"rule: {verdict.rule}"]
    if verdict.place:
        lines.append(f"place: {verdict.place}")
    for part in parts:
        lines += ["", part.title]
        for line in part.lines:
            lines += wrap(line, WIDTH, initial_indent="  - ", subsequent_indent="    ")
        lines += [f"  {line}" for line in part.verbatim]
        lines += _columns(part.table)
    return "\n".join(lines) + "\n"


def _columns(table: list[list[str]]) -> list[str]:
    """Aligned; the last column of a wide table goes on below itself."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
    last = sum(width + 2 for width in widths) + 2
    lines = []
    for row in table if len(table) > 1 else ():
        start = "  " + "".join(f"{c:<{w}}  " for c, w in zip(row[:-1], widths, strict=True))
        rest = wrap(row[-1], max(30, WIDTH - last)) or [""]
        lines.append((start + rest[0]).rstrip())
        lines += [" " * last + more for more in rest[1:]]
    return lines


def _markdown(verdict: Verdict, name: str, parts: list[Section]) -> str:
    title = f"### Trial `{name}`: {verdict.label}" if name else f"### {verdict.label}"
    place = f", at `{verdict.place}`" if verdict.place else ""
    blocks = [title, f"Rule: *{verdict.rule}*{place}"]
    for part in parts:
        blocks.append(f"**{part.title}**")
        if part.lines:
            blocks.append("\n".join(f"- {_plain(line)}" for line in part.lines))
        if part.verbatim:
            blocks.append("\n".join(["```text", *part.verbatim, "```"]))
        if part.table[1:]:
            cells = [[_plain(cell.replace("|", "\\|")) for cell in row] for row in part.table]
            head, *rows = ["| " + " | ".join(row) + " |" for row in cells]
            blocks.append("\n".join([head, f"|{'|'.join('---' for _ in cells[0])}|", *rows]))
    return "\n\n".join(blocks) + "\n"


def _plain(text: str) -> str:
    """What markdown would take for its own stays as it is."""
    for mark in ("*", "_", "<"):
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())
