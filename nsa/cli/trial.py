"""`nsa trial`: one supervised trial, and its verdict."""

import os
import sys

from nsa.cli.options import FAILED, GOOD, command, trials_option
from nsa.spelling import settings

# What is said of the trial itself and not of its subject.
OF_THE_PLAN = ("subject", "steps", "deadline_s", "predicted_s", "stall_s", "calibrate", "oracles")


def add(commands) -> None:
    """Its parser."""
    text = (
        "Run one trial under supervision and judge it. Exit code 0 if it passed. "
        "subject=package.module:make names anything that makes steps; by default it is a training "
        "step of this package: layers=2 backend=gather tokens=256."
    )
    made = command(commands, "trial", trial, text)
    made.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help=f"a factor of the subject, or {', '.join(OF_THE_PLAN)}",
    )
    made.add_argument("--factors", action="store_true", help="list the factors and end")
    trials_option(made)


def trial(arguments) -> int:
    from nsa.lab.search.plan import Plan
    from nsa.lab.search.training_factors import listed

    if arguments.factors:
        print(listed())
        return GOOD
    import_from_here()
    given = settings(arguments.settings, "layers=2")
    whole = {name: given.pop(name) for name in OF_THE_PLAN if name in given}
    if isinstance(whole.get("oracles"), str):
        whole["oracles"] = [word for word in whole["oracles"].split(",") if word]
    plan = Plan(factors={}, settings=given, **whole)

    from nsa.lab.search.candidates import Spent
    from nsa.lab.search.execute import Trials
    from nsa.lab.search.ledger import Ledger

    try:
        done = Trials(plan, Ledger(arguments.trials)).run({})
    except Spent as spent:
        print(f"nsa: {spent}", file=sys.stderr)
        return FAILED
    print(f"{done.verdict.label}  trial {done.id}{'  (was there)' if done.cached else ''}")
    for sentence in done.verdict.because:
        print(f"  {sentence}")
    if done.calibrated:
        print(f"  {done.calibrated}")
    print(f"  more: nsa explain {done.id}")
    return GOOD if done.verdict.kind == "PASS" else FAILED


def import_from_here() -> None:
    """The current folder is looked into, as `python -m nsa` does and `nsa` does not."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
