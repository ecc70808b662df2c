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
ROWS = 8  # of progress
FRAMES = 5
BARS = " ▁▂▃▄▅▆▇█"


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
        _ran(evidence),
        _ended(evidence),
        _progress(evidence),
        _stacks(evidence),
        _collectives(evidence),
        _oracles(evidence),
        _losses(evidence),
        _rerun(evidence),
        Section("Notes", [*evidence.preflight, *evidence.notes]),
    ]
    return [section for section in made if section.lines or section.table or section.verbatim]


def _ran(evidence: Evidence) -> Section:
    spec, environment = evidence.spec, evidence.environment
    rows = [["what", "value"]]
    for name in ("subject", "steps", "ranks", "seed", "python"):
        if spec.get(name) is not None:
            rows.append([name, str(spec[name])])
    for name in ("settings", "env"):
        if spec.get(name):
            rows.append([name, _pairs(spec[name])])
    for name in ("observers", "oracles"):
        if spec.get(name):
            rows.append([name, ", ".join(map(str, spec[name]))])
    told = {k: v for k, v in environment.items() if isinstance(v, str | int | float) and v != ""}
    if told:
        rows.append(["environment", _pairs(told)])
    limits = {
        "predicted": evidence.predicted_s,
        "soft deadline": evidence.soft_s,
        "deadline": evidence.deadline_s,
        "P may rest": evidence.stall_s,
    }
    said = ", ".join(f"{name} {s:.3g} s" for name, s in limits.items() if s is not None)
    slowed = f"; observers slow it {evidence.factor:.2g} x" if evidence.factor != 1 else ""
    return Section("What ran", table=[*rows, ["times", said + slowed]])


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
        for number, index in enumerate(chosen):
            before = samples[chosen[number - 1]] if number else None
            table.append(_row(samples[index], before))
    return Section("Progress", table=table if verbatim else [], verbatim=verbatim)


def _row(sample: Sample, before: Sample | None) -> list[str]:
    beats = core = ""
    if before is not None and sample.t > before.t:
        beats = f"{(sample.beats - before.beats) / (sample.t - before.t):.1f}"
        core = f"{(sample.cpu_s - before.cpu_s) / (sample.t - before.t):.0%}"
    place = [f"{sample.t:.1f} s", str(sample.rank), str(sample.p)]
    return [*place, beats, core, sample.state, sample.wchan]


def _stacks(evidence: Evidence) -> Section:
    """Looks one after the other that saw the same are told once."""
    verbatim: list[str] = []
    ordered = sorted(evidence.looks, key=lambda x: (x.rank, x.tool))
    for (rank, tool), mine in groupby(ordered, key=lambda x: (x.rank, x.tool)):
        for words, same in groupby(sorted(mine, key=lambda x: x.t), key=_words):
            if not words:
                continue
            seen = list(same)
            times = f"{len(seen)} looks, {seen[0].t:.1f} to {seen[-1].t:.1f} s"
            when = times if len(seen) > 1 else f"{seen[0].t:.1f} s"
            verbatim += [f"rank {rank}, {tool}, {when}", *(f"  {line}" for line in words)]
    return Section("Stacks", verbatim=verbatim)


def _words(look: Look) -> tuple[str, ...]:
    shown = [t for t in look.threads if t.get("frames")]
    if not shown:
        return (f"no stack: {look.message}",) if look.message else ()
    thread = at_work(shown)
    holds = {True: ", has the GIL", False: ", without the GIL"}.get(thread.get("gil"), "")
    frames, more = thread["frames"][:FRAMES], len(thread["frames"]) - FRAMES
    rest = (f"  ... {more} more",) if more > 0 else ()
    return (f"{thread.get('name') or 'thread'}{holds}", *(f"  {f}" for f in frames), *rest)


def _collectives(evidence: Evidence) -> Section:
    rows = [["rank", "number", "operation", "state", "sizes", "at"]]
    for rank, entries in sorted(evidence.flights.items()):
        rows += [
            [str(rank), *(str(e.get(k, "")) for k in ("seq", "op", "state", "sizes")),
             next(iter(e.get("frames") or []), "")]
            for e in entries[-3:]
        ]  # fmt: skip
    return Section("Last collectives", table=rows if len(rows) > 1 else [])


def _oracles(evidence: Evidence) -> Section:
    words = {True: "holds", False: "BROKEN", None: "?"}
    rows = [
        [words.get(result.get("ok"), "?"), name, str(result.get("detail", ""))]
        for name, result in evidence.oracles.items()
    ]
    return Section("Oracles", table=[["", "oracle", "what it saw"], *rows] if rows else [])


def _losses(evidence: Evidence) -> Section:
    losses = evidence.losses
    if not losses:
        return Section("Losses")
    shown = [f"{loss:.4g}" for loss in (losses if len(losses) < 7 else losses[:3])]
    rest = ["..."] + [f"{loss:.4g}" for loss in losses[-3:]] if len(losses) >= 7 else []
    return Section("Losses", [f"{len(losses)}: {', '.join([*shown, *rest])}"])


def _rerun(evidence: Evidence) -> Section:
    """The invariance that is told with a rest: P at the deadline and at twice the deadline."""
    again = evidence.again
    if again is None:
        return Section("Rerun")
    rows = [["run", "deadline", "seconds", "P at its end", "ended by"]]
    for name, one in (("first", evidence), ("rerun", again)):
        deadline = "" if one.deadline_s is None else f"{one.deadline_s:.1f} s"
        how = "" if one.end is None else _how(one.end)
        ranks = one.ranks() or [0]
        places = "; ".join(str(one.last(rank)) for rank in ranks)
        rows.append([name, deadline, f"{one.seconds:.1f}", places, how])
    return Section("Rerun for twice as long", table=rows)


def _pairs(found: dict[str, Any]) -> str:
    return ", ".join(_flat(found))


def _flat(found: dict[str, Any], before: str = "") -> Iterator[str]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}={value}"


WIDTH = 100


def page(
    evidence: Evidence, verdict: Verdict | None = None, *, name: str = "", markdown: bool = False
) -> str:
    """Verdict, rule, what it read, progress, stacks, oracles, rerun; `verdict` None: judged now.

    name: the trial's id. Lines of a terminal's page have at most 100 characters, but for stacks.
    """
    verdict = judge(evidence) if verdict is None else verdict
    parts = sections(evidence, verdict)
    return _markdown(verdict, name, parts) if markdown else _text(verdict, name, parts)


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
    if not table:
        return []
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    last = sum(width + 2 for width in widths[:-1]) + 2
    lines = []
    for row in table:
        start = "  " + "".join(f"{c:<{w}}  " for c, w in zip(row[:-1], widths[:-1], strict=True))
        rest = wrap(row[-1], max(30, WIDTH - last)) or [""]
        lines.append((start + rest[0]).rstrip())
        lines += [" " * last + more for more in rest[1:]]
    return lines


def _markdown(verdict: Verdict, name: str, parts: list[Section]) -> str:
    title = f"### Trial `{name}`: {verdict.label}" if name else f"### {verdict.label}"
    blocks = [
        title,
        f"Rule: *{verdict.rule}*" + (f", at `{verdict.place}`" if verdict.place else ""),
    ]
    for part in parts:
        blocks.append(f"**{part.title}**")
        if part.lines:
            blocks.append("\n".join(f"- {_plain(line)}" for line in part.lines))
        if part.verbatim:
            blocks.append("\n".join(["```text", *part.verbatim, "```"]))
        if part.table:
            head, *rows = ([_cell(cell) for cell in row] for row in part.table)
            rule = "|".join("---" for _ in head)
            blocks.append("\n".join(["| " + " | ".join(row) + " |" for row in [head]]
                                    + [f"|{rule}|"]
                                    + ["| " + " | ".join(row) + " |" for row in rows]))  # fmt: skip
    return "\n\n".join(blocks) + "\n"


def _cell(text: str) -> str:
    return _plain(text.replace("|", "\\|"))


def _plain(text: str) -> str:
    """What markdown would take for its own stays as it is."""
    for mark in ("*", "_", "<"):
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())
