"""`nsa trial selfcheck`: run the faults and programs that fit this machine, and judge each."""

import argparse
import sys
import time

from workbook.cli.options import FAILED, GOOD, SEVERAL, check_json, command, duration, provenance
from workbook.rooms.selfcheck.registry import GROUPS


def add(commands) -> None:
    """Add the parser."""
    option = command(commands, selfcheck, under="trial").add_argument
    text = "these alone; may be given several times"
    option("--group", choices=GROUPS, help=text, **SEVERAL)
    text = "programs written before the rules were frozen, or after"
    option("--batch", choices=("first", "frozen"), help=text, **SEVERAL)
    text = "one fault, control or program; may be given several times"
    option("--only", metavar="NAME", help=text, **SEVERAL)
    option("--rounds", type=int, default=1, metavar="N", help="how often; 1 by default")
    text = "busy loops beside the trials, whose deadlines are longer then; 0 by default"
    option("--load", type=int, default=0, metavar="N", help=text)
    text = "trials at once, of those that mostly wait; 3 by default"
    option("--workers", type=int, default=3, metavar="N", help=text)
    text = "every N-th trial from the I-th on: 1/8 to 8/8 on eight machines are all"
    option("--part", type=_part, default=(1, 1), metavar="I/N", help=text)
    text = "no trial begins after that: 90, 90s, 20m or 2h"
    option("--budget", type=duration, metavar="TIME", help=text)
    option("--folder", metavar="DIR", help="keep every trial's evidence there")
    option("--json", metavar="FILE", help="write a row a trial there")
    option("--list", action="store_true", help="only say what there is to run")


def selfcheck(arguments) -> int:
    """Run the faults and programs that fit this machine, judge each, and print the matrix."""
    from workbook.rooms.selfcheck import registry
    from workbook.rooms.selfcheck.trials import check, slack
    from workbook.runs.files import write_json

    chosen = registry.chosen(arguments.only, arguments.group, arguments.batch)
    if arguments.list:
        for fault in chosen:
            print(f"{fault.name:36} {fault.due:26} {fault.text}")
        return GOOD
    check_json(arguments.json)
    if (times := slack(arguments.load)) > 1:
        print(f"{arguments.load} busy loops beside: deadlines {times} x as long", file=sys.stderr)
    began, told, origin = time.monotonic(), [], provenance() if arguments.json else {}

    def say(row) -> None:
        """Write the rows so far at once, since a sweep of hours may be ended early."""
        print(row, file=sys.stderr, flush=True)
        told.append(row)
        write(told)

    def write(rows) -> None:
        if arguments.json:
            content = {"seconds": time.monotonic() - began, "rows": [x.to_dict() for x in rows]}
            write_json(arguments.json, origin | content)

    rows = check(
        chosen,
        rounds=arguments.rounds,
        workers=arguments.workers,
        load=arguments.load,
        part=arguments.part,
        budget_s=arguments.budget,
        folder=arguments.folder,
        say=say,
    )
    write(rows)
    print(text(rows, time.monotonic() - began), flush=True)
    return FAILED if any(row.missed for row in rows) else GOOD


def text(rows, seconds: float) -> str:
    """Text of the matrix, the missed faults, and the totals."""
    from whyhung.verdict import KINDS
    from workbook.rooms.selfcheck.judged import matrix

    counts = matrix(rows)
    found = [kind for kind in KINDS if any(kind in row for row in counts.values())]
    width = max([len("planted"), *map(len, counts)])
    lines = ["planted".ljust(width) + "".join(f"{kind:>14}" for kind in found)]
    for due, row in counts.items():
        lines.append(due.ljust(width) + "".join(f"{row.get(kind, ''):>14}" for kind in found))
    run = [row for row in rows if not row.skipped]
    missed = [row for row in run if row.missed]
    lines += ["", *map(str, missed)]
    skipped, right = len(rows) - len(run), len(run) - len(missed)
    controls = [row for row in run if row.control]
    lines.append(
        f"{right} of {len(run)} right in {seconds:.0f} s"
        + (f", {skipped} skipped" if skipped else "")
        + f"; of {len(controls)} healthy ones {sum(row.ever('HANG') for row in controls)} were "
        f"called HANG, {sum(row.ever('STALLED') for row in controls)} STALLED for a while"
    )
    return "\n".join(lines)


def _part(text: str) -> tuple[int, int]:
    """`2/8` as (2, 8)."""
    number, slash, parts = text.partition("/")
    if not (slash and number.isdigit() and parts.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; write 2/8")
    return int(number), int(parts)
