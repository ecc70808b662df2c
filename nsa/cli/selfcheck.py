"""`nsa selfcheck`: plants every fault that this machine can hold, and judges each blind."""

import sys
import time

from nsa.cli.options import FAILED, GOOD, SEVERAL, check_json, command, provenance


def add(commands) -> None:
    """Its parser."""
    option = command(commands, selfcheck).add_argument
    option("--rounds", type=int, default=1, metavar="N", help="how often; 1 by default")
    text = "one fault or control; may be given several times"
    option("--only", metavar="NAME", help=text, **SEVERAL)
    text = "trials at once, of those that mostly wait; 3 by default"
    option("--workers", type=int, default=3, metavar="N", help=text)
    option("--folder", metavar="DIR", help="keep every trial's evidence there")
    option("--json", metavar="FILE", help="write a row a trial there")
    option("--list", action="store_true", help="only say what there is to plant")


def selfcheck(arguments) -> int:
    """Plant every fault that this machine can hold, judge each, and print the confusion matrix."""
    from nsa.experiments.selfcheck.faults import registry
    from nsa.experiments.selfcheck.trials import check

    chosen = registry.chosen(arguments.only)
    if arguments.list:
        for fault in chosen:
            print(f"{fault.name:30} {' or '.join(fault.kinds):14} {fault.text}")
        return GOOD
    check_json(arguments.json)
    began = time.monotonic()
    rows = check(
        chosen,
        rounds=arguments.rounds,
        workers=arguments.workers,
        folder=arguments.folder,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    seconds = time.monotonic() - began
    print(text(rows, seconds), flush=True)
    if arguments.json:
        from nsa.workbook.files import write_json

        content = {"seconds": seconds, "rows": [row.to_dict() for row in rows]}
        write_json(arguments.json, provenance() | content)
    return FAILED if any(row.missed for row in rows) else GOOD


def text(rows, seconds: float) -> str:
    """The confusion matrix, what was missed, and the sum of it."""
    from nsa.experiments.selfcheck.judged import line, matrix
    from nsa.lab.verdict import KINDS

    counts = matrix(rows)
    found = [kind for kind in KINDS if any(kind in row for row in counts.values())]
    width = max([len("planted"), *map(len, counts)])
    lines = ["planted".ljust(width) + "".join(f"{kind:>14}" for kind in found)]
    for due, row in counts.items():
        lines.append(due.ljust(width) + "".join(f"{row.get(kind, ''):>14}" for kind in found))
    run = [row for row in rows if not row.skipped]
    missed = [row for row in run if row.missed]
    lines += ["", *(line(row) for row in missed)]
    skipped, right = len(rows) - len(run), len(run) - len(missed)
    hung = sum(1 for row in run if row.control and row.found == "HANG")
    lines.append(
        f"{right} of {len(run)} right in {seconds:.0f} s"
        + (f", {skipped} skipped" if skipped else "")
        + f"; controls called HANG: {hung}"
    )
    return "\n".join(lines)
