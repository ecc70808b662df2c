"""`nsa selfcheck`: plants every fault that this machine can hold, and judges each blind."""

import sys
import threading
import time
from pathlib import Path

from nsa.cli.options import FAILED, GOOD, command


def add(commands) -> None:
    """Its parser."""
    made = command(
        commands,
        "selfcheck",
        selfcheck,
        "Plant every fault that this machine can hold, judge each, and print the confusion matrix.",
    )
    made.add_argument("--rounds", type=int, default=1, metavar="N", help="how often; 1 by default")
    made.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="one fault or control; may be given several times",
    )
    made.add_argument(
        "--workers",
        type=int,
        default=3,
        metavar="N",
        help="trials at once, of those that mostly wait; 3 by default",
    )
    made.add_argument("--folder", metavar="DIR", help="keep every trial's evidence there")
    made.add_argument("--json", metavar="FILE", help="write a row a trial there")
    made.add_argument("--list", action="store_true", help="only say what there is to plant")


def selfcheck(arguments) -> int:
    from nsa.experiments.selfcheck.faults import registry
    from nsa.experiments.selfcheck.trials import check

    chosen = registry.chosen(arguments.only)
    if arguments.list:
        for fault in chosen:
            print(f"{fault.name:30} {' or '.join(fault.kinds):14} {fault.text}")
        return GOOD
    if arguments.json and not Path(arguments.json).resolve().parent.is_dir():
        raise ValueError(f"--json {arguments.json}: its folder does not exist; make it first")
    if arguments.json and Path(arguments.json).is_dir():
        raise ValueError(f"--json {arguments.json} is a folder; name a file")
    began, stop = time.monotonic(), threading.Event()
    rows = check(
        chosen,
        rounds=arguments.rounds,
        workers=arguments.workers,
        folder=arguments.folder,
        say=lambda text: print(text, file=sys.stderr, flush=True),
        stop=stop,
    )
    seconds = time.monotonic() - began
    print(text(rows, seconds), flush=True)
    if arguments.json:
        from nsa.workbook import environment
        from nsa.workbook.files import plain, write_json

        facts = environment.provenance(environment.snapshot()) | {"date": environment.utc_now()}
        content = {**facts, "seconds": seconds, "rows": [row.to_dict() for row in rows]}
        write_json(arguments.json, plain(content))
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
    skipped = sum(1 for row in rows if row.skipped)
    hung = sum(1 for row in run if row.control and row.found == "HANG")
    lines.append(
        f"{len(run) - len(missed)} of {len(run)} right in {seconds:.0f} s"
        + (f", {skipped} skipped" if skipped else "")
        + f"; controls called HANG: {hung}"
    )
    return "\n".join(lines)
