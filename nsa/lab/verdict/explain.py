"""A trial's verdict, its rule and its evidence as a page: for a terminal, or as markdown."""

from __future__ import annotations

from textwrap import wrap

from nsa.lab.verdict.explain_sections import Section, sections
from nsa.lab.verdict.rules import judge
from nsa.lab.verdict.ruling import Verdict
from nsa.lab.watch.evidence import Evidence

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
