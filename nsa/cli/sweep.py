"""`nsa sweep`: every trial of a plan, for as long as there is time; what is finished stays."""

import sys

from nsa.cli.options import FAILED, GOOD, command, duration, trials_option
from nsa.cli.trial import import_from_here


def add(commands) -> None:
    """Its parser."""
    text = (
        "Run the trials of a plan, a YAML file. A finished trial is not run again, so the same "
        "command goes on where it was cut off. Exit code 0 if all were run and passed."
    )
    made = command(commands, "sweep", sweep, text)
    made.add_argument("plan", metavar="PLAN", help="YAML file: factors, settings, steps, ...")
    made.add_argument("--budget", type=duration, metavar="TIME", help="90, 90s, 20m or 2h")
    made.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="also on several GPUs, which else have a trial each: those share a host",
    )
    made.add_argument("--list", action="store_true", help="tell what would be run, and end")
    trials_option(made)


def sweep(arguments) -> int:
    from nsa.lab.search.candidates import text

    plan = plan_from(arguments.plan)
    if arguments.list:
        cells = list(plan.cells())
        print(text([dict(cell) for cell in cells]))
        print(f"{len(cells)} trials of {plan.size():,} combinations")
        return GOOD

    from nsa.lab.search.execute import sweep as run_sweep
    from nsa.lab.search.ledger import Ledger

    swept = run_sweep(
        plan,
        Ledger(arguments.trials),
        gpus=None if arguments.one_at_a_time else gpus_of(plan),
        budget_s=arguments.budget,
        say=_say,
    )
    print(text([row(done) for done in swept.done]))
    for number, verdict in swept.flaky.items():
        print(f"trial {swept.done[number].id} and its repeats: {verdict.label}")
        print("".join(f"  {sentence}\n" for sentence in verdict.because), end="")
    for one, other in swept.invalid:
        print(f"INVALID: {one.id} and {other.id} ran the same code; they compare nothing")
    if swept.not_run:
        print(
            f"{len(swept.not_run)} of {len(list(plan.cells()))} cells not run: {swept.why}; "
            "the same command goes on"
        )
    passed = all(done.verdict.kind == "PASS" for done in swept.done)
    return GOOD if passed and not (swept.not_run or swept.flaky or swept.invalid) else FAILED


def plan_from(path: str):
    """The plan in a YAML file; what of it cannot be run here is told. ValueError names the file."""
    from nsa.lab.search.plan import Plan
    from nsa.workbook.parameters import read_file

    import_from_here()
    content = read_file(path)
    try:
        plan = Plan.from_dict(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
    for note in plan.left_out:
        print(f"left out: {note}", file=sys.stderr)
    return plan


def gpus_of(plan):
    """The visible GPUs if any trial of the plan can use one, else None."""
    from nsa.lab.process import gpus, preflight

    specs = map(plan.spec, plan.cells())
    uses = any(preflight.uses_gpu(spec.settings, spec.env) for spec in specs)
    return gpus.all_visible() if uses else None


def row(done) -> dict:
    """One line of the table of a sweep."""
    found = {"trial": done.id, "verdict": done.verdict.label}
    return found | dict(done.cell) | {"seconds": f"{done.evidence.seconds:.1f}"}


def _say(done) -> None:
    cell = ", ".join(f"{name}={value}" for name, value in done.cell.items())
    again = " (was there)" if done.cached else ""
    print(f"{done.id} {done.verdict.label}{again}: {cell}", file=sys.stderr, flush=True)
