"""Page of a job that is gone: guilty ranks first, then the open calls of each group."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap
from typing import Any

from whyhung.verdict.flights import Pair, Pending, group_said, line_said, ranks_said
from whyhung.verdict.guilt import Blame, Found, Wait
from whyhung.watch.dumps import Dumps

WIDTH = 120
ROWS = 12  # rows of the table
LINES = 20  # lines on who waits for whom


def headline(found: Found, dumps: Dumps) -> str:
    """Return the first line: the guilty ranks, or that nothing stands."""
    ranks = [blame.rank for blame in found.guilty]
    read = f"{len(dumps.flights)} dump{'s' * (len(dumps.flights) > 1)} that could be read"
    if ranks:
        others = len(dumps.world) - len(ranks)
        return f"{ranks_said(ranks)} {_s('hold', ranks)} up the other {others} of this job"
    if dumps.moving and (found.calls or found.pairs):
        return "the job still moved when this was recorded: calls are open, and nobody is blamed"
    if found.suspects:
        return "calls are open, and no rank can be named that holds them up"
    if found.calls or found.pairs:
        return "calls are open, and nobody is seen to wait for another"
    return f"nothing stands: every call in the {read} is over"


def page(found: Found, dumps: Dumps) -> str:
    """Return the page in plain words; a few dozen lines for any number of ranks."""
    lines = [headline(found, dumps)]
    for why in dict.fromkeys((*(blame.why for blame in found.guilty), *found.suspects)):
        lines += wrap(why, WIDTH, subsequent_indent="  ")
    spread = _spread(found)
    if spread:
        lines += ["", "Who waits for whom", *(f"  {line}" for line in spread[:LINES])]
    lines += [f"  and {len(spread) - LINES} more lines"] if len(spread) > LINES else []
    table = groups(found)
    if table:
        heads = list(table[0])
        cells = [heads, *([str(row[head]) for head in heads] for row in table[:ROWS])]
        lines += ["", "Groups with calls that are open", *_columns(cells)]
        lines += [f"  and {len(table) - ROWS} more groups"] if len(table) > ROWS else []
    told = dumps.said()
    lines += ["", "The dumps", *(f"  {note}" for note in told)] if told else []
    return "\n".join(lines) + "\n"


def groups(found: Found) -> list[dict[str, str]]:
    """Return a row per group, its oldest call that is not over for all; the blamed ones first."""
    guilty = {blame.rank for blame in found.guilty}
    oldest: dict[tuple[Any, ...], Pending] = {}
    for call in found.calls:
        oldest.setdefault((call.group, call.library, call.members), call)
    rows = [(bool(guilty & {*call.members}), _row(call)) for call in oldest.values()]
    firsts: dict[str, Pair] = {}
    for pair in found.pairs:
        firsts.setdefault(f"{pair.group} {pair.rank}", pair)
    rows += [(bool(guilty & {pair.rank, pair.peer}), _of_pair(pair)) for pair in firsts.values()]
    return [row for _, row in sorted(rows, key=lambda one: not one[0])]


def to_dict(found: Found) -> dict[str, Any]:
    """Return everything that was found, as JSON holds it."""
    return {
        "guilty": [_blame(blame) for blame in found.guilty],
        "suspects": list(found.suspects),
        "waits": [
            {"rank": w.rank, "for": w.peer, "how": w.how, **_call(w.call)} for w in _once(found)
        ],
        "groups": groups(found),
    }


def _blame(blame: Blame) -> dict[str, Any]:
    told = {"rank": blame.rank, "kind": blame.kind, "why": blame.why}
    return {**told, **_call(blame.call), "waiting": list(blame.waiting)}


def _call(call: Pending | Pair) -> dict[str, Any]:
    return {
        "group": call.group,
        "number": call.number,
        "op": call.op,
        "line": line_said(call),
    }


def _once(found: Found) -> list[Wait]:
    """Return the first of the waits of one rank for another."""
    first: dict[tuple[int, int], Wait] = {}
    for wait in found.waits:
        first.setdefault((wait.rank, wait.peer), wait)
    return list(first.values())


def _spread(found: Found) -> list[str]:
    """Return waits from the guilty outwards: ranks that wait for them, then ranks for these."""
    peers: dict[int, set[int]] = {}
    for wait in found.waits:
        peers.setdefault(wait.rank, set()).add(wait.peer)
    reached = {blame.rank for blame in found.guilty}
    lines = []
    while reached:
        new = {rank for rank, after in peers.items() if rank not in reached and after & reached}
        by: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(new):
            by.setdefault(tuple(sorted(peers[rank] & reached)), []).append(rank)
        lines += [f"{ranks_said(r)} {_s('wait', r)} for {ranks_said(p)}" for p, r in by.items()]
        if not new:
            break
        reached |= new
    return lines


def _s(verb: str, ranks: Iterable[int]) -> str:
    return verb + "s" * (len(list(ranks)) == 1)


def _row(call: Pending) -> dict[str, str]:
    open_ = [rank for rank in call.entries if rank not in call.completed]
    return {
        "group": group_said(call),
        "of ranks": _short(call.members),
        "oldest open": f"{call.op} {call.number}",
        "called by": _short(open_),
        "not by": _short((*call.missing, *call.unseen)),
        "over for": _short(call.completed),
        "line": line_said(call),
    }


def _of_pair(pair: Pair) -> dict[str, str]:
    answered = {True: "", False: str(pair.peer), None: "?"}[pair.matched]
    return {
        "group": group_said(pair),
        "of ranks": _short(pair.row.get("ranks") or ()),
        "oldest open": f"{pair.op} {'to' if pair.op == 'send' else 'from'} {pair.peer}",
        "called by": str(pair.rank),
        "not by": answered,
        "over for": "",
        "line": line_said(pair),
    }


def _short(ranks: Iterable[int]) -> str:
    told = list(ranks)
    return ranks_said(told).partition(" ")[2] if told else ""


def _columns(cells: list[list[str]]) -> list[str]:
    used = [n for n, column in enumerate(zip(*cells[1:], strict=True)) if any(column)]
    widths = [max(len(row[n]) for row in cells) for n in used]
    rows = ([row[n].ljust(width) for n, width in zip(used, widths, strict=True)] for row in cells)
    return ["  " + "  ".join(row).rstrip() for row in rows]
