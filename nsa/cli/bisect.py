"""`nsa bisect`: the smallest set of factors behind a fault, and the trials that say so."""

import sys

from nsa.cli.options import FAILED, GOOD, command, duration, trials_option
from nsa.cli.sweep import plan_from


def add(commands) -> None:
    """Its parser."""
    text = (
        "Find the smallest set of a plan's factors that causes a fault, or the threshold of one. "
        "Prints the ledger: trial, hypothesis, verdict, what it eliminated. Exit code 0 if a cause "
        "was found."
    )
    made = command(commands, "bisect", bisect, text)
    made.add_argument("plan", metavar="PLAN", help="YAML file: factors, settings, steps, ...")
    made.add_argument("--budget", type=duration, metavar="TIME", help="90, 90s, 20m or 2h")
    trials_option(made)


def bisect(arguments) -> int:
    from nsa.lab.search.bisect_plan import bisect as search
    from nsa.lab.search.candidates import table, text
    from nsa.lab.search.ledger import Ledger

    plan = plan_from(arguments.plan)
    found = search(plan, Ledger(arguments.trials), budget_s=arguments.budget, say=_say)
    print(text(table(found.rows)))
    print(found)
    if found.why and found.why not in str(found):
        print(found.why)
    for other in getattr(found, "others", ()):
        print(f"another fault was seen: {other} (nsa explain {other.id})")
    if found.target is not None:
        print(f"more: nsa explain {found.target.id}")
    return GOOD if found.solved else FAILED


def _say(row) -> None:
    print(f"{row.number:3} {row.tried}: {row.changed}", file=sys.stderr, flush=True)
