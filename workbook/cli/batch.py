"""`nsa batch`: many runs from one plan."""

import json
import sys

from workbook.cli.options import FAILED, GOOD, SEVERAL, command, share

ASK = 200  # larger numbers of runs need a confirmation


def add(commands) -> None:
    """Add the parser."""
    made = command(commands, batch)
    option = made.add_argument
    option("plan", metavar="PLAN", help="YAML file of jobs: notebooks x grids of parameters")
    text = "here (the default) or on Slurm"
    option("--on", choices=("here", "slurm"), default="here", help=text)
    text = "a setting of jobs on Slurm, as partition=gpu or time=2h, instead of the plan's"
    option("--slurm", metavar="NAME=VALUE", help=text, **SEVERAL)
    text = "how many beside each other; default: as many as GPUs, one without any; 100 on Slurm"
    option("--at-once", type=int, metavar="N", help=text)
    option(
        "--dry-run", action="store_true", help="print what would run, and for how long, and exit"
    )
    option("--status", action="store_true", help="print the state of its jobs, and exit")
    option("--cancel", action="store_true", help="end what runs; the same plan goes on later")
    option("--retry", action="store_true", help="run also what failed")
    option("--anew", action="store_true", help="start over where notebooks or nsa/ have changed")
    option("--yes", action="store_true", help=f"do not ask, though more than {ASK} are to run")
    option("--quiet", action="store_true", help="no progress, only a line for each job")
    share(made, "--budget", "--evidence", "--json", "--runs", "--notebooks")


def batch(arguments) -> int:
    """Run the notebooks of a plan, each into its dated folder: one after another, with a GPU each,
    or on Slurm. Finished runs are not repeated, so the same command continues an interrupted batch.
    Exit code 0 if all ran and no verdict is FAIL."""
    from workbook.lab.search.candidates import text
    from workbook.runs.batch import show
    from workbook.runs.batch.driver import Driver
    from workbook.runs.batch.plan import read_plan
    from workbook.runs.batch.state import Batch

    if arguments.at_once is not None and arguments.at_once < 1:
        raise ValueError(f"--at-once {arguments.at_once}: write how many, 1 or more")
    plan = read_plan(arguments.plan, arguments.notebooks, _settings(arguments.slurm))
    found = Batch(plan, arguments.runs, arguments.evidence)
    for note in found.notes:
        print(f"nsa: {note}", file=sys.stderr)
    if arguments.status:
        driver = found.driver()
        if arguments.json:
            told = {"plan": str(plan.path), "driven": bool(driver), "jobs": show.table(found)}
            print(json.dumps(told, indent=2))
        else:
            print(text(show.table(found)))
            print(show.counted(found) + (f"; {driver}" if driver else ""))
            print("".join(f"{line}\n" for line in show.failures(found)), end="")
        return GOOD
    place = _place(arguments, plan)
    if arguments.cancel:
        Driver(found, place, say=lambda line: print(line, file=sys.stderr)).cancel()
        print(show.counted(Batch(plan, arguments.runs, arguments.evidence)))
        return GOOD
    if arguments.anew and not arguments.dry_run:
        found.put_aside()
        found = Batch(plan, arguments.runs, arguments.evidence)
    expected = show.estimate(found, place.at_a_time)
    if arguments.dry_run:
        print(text(show.table(found)[:ASK]))
        print("".join(f"changed since it began: {one}\n" for one in found.changed()), end="")
        print(f"{len(found.jobs):,} jobs: {show.counted(found)}\n{expected}")
        return GOOD
    _ask(found, expected, arguments)
    with show.live(found, arguments.quiet) as (picture, say):
        say(f"{plan.path}: {expected}")
        options = {"retry": arguments.retry, "budget_s": arguments.budget}
        driver = Driver(found, place, **options, show=picture, say=say)
        jobs = driver.run()
    if arguments.json:
        print(json.dumps(show.table(found), indent=2))
    else:
        rows = show.table(found)
        if len(rows) > ASK:
            rows = [row for row in rows if not row["status"].startswith("ok")]
        print(text(rows) if rows else "all ran")
        print(show.counted(found) + (f" ({driver.why})" if driver.why else ""))
        print("".join(f"{line}\n" for line in show.failures(found)), end="")
        if any(job.status == "failed" for job in jobs):
            print("what failed is run again with --retry")
        if not all(job.status in ("ok", "failed") for job in jobs):
            print("the same command goes on")
    return GOOD if all(job.status == "ok" and job.verdict != "FAIL" for job in jobs) else FAILED


def _settings(texts: list[str]) -> dict:
    from nsa.spelling import pair
    from workbook.runs import parameters

    kinds = {"cpus": "int", "at_once": "int", "memory_gb": "float", "setup": "list[str]"}
    given = dict(pair(text, "--slurm time=2h") for text in texts)
    return {name: parameters.parse(text, kinds.get(name, "str")) for name, text in given.items()}


def _place(arguments, plan):
    if arguments.on == "here" and not arguments.slurm:
        from workbook.runs.batch.local import Local

        return Local(arguments.at_once)
    from workbook.runs.batch.slurm import Slurm

    at_once = {"at_once": arguments.at_once} if arguments.at_once else {}
    return Slurm(plan.slurm | at_once)


def _ask(found, expected: str, arguments) -> None:
    """Ask before many runs. ValueError if declined, or if there is no terminal to ask on."""
    left = sum(job.status in ("to run", "stopped") for job in found.jobs)
    if left <= ASK or arguments.yes:
        return
    if not sys.stdin.isatty():
        raise ValueError(f"{arguments.plan}: {expected}; begin so many with --yes")
    if input(f"{expected}. Begin? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ValueError("nothing was begun")
