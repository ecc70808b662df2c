"""`nsa notebooks`, `run`, `runs`, `show`, `report` and `env`: notebooks and stored runs."""

import json
import re
import sys
from pathlib import Path

from nsa.spelling import pair
from workbook.cli.options import FAILED, GOOD, SEVERAL, command, duration, share


def add(commands) -> None:
    """Add the parsers."""
    command(commands, notebooks, "--notebooks", "--runs")
    made = command(commands, run)
    option = made.add_argument
    option("notebook", metavar="NAME", help="name, number, part of the name, or path")
    text = "one parameter, lists as 128,256; wins over a file's"
    option("-p", "--parameter", metavar="NAME=VALUE", help=text, **SEVERAL)
    text = "YAML file of parameters, or the name of a shipped one (h200); later files win"
    option("-f", "--file", metavar="FILE", help=text, **SEVERAL)
    text = "for the whole notebook, whose budgets end before it: 90, 90s, 20m, 2h"
    option("--timeout", type=duration, metavar="TIME", help=text)
    text = "for each cell: 90, 90s, 20m, 2h"
    option("--cell-timeout", type=duration, metavar="TIME", help=text)
    option("--again", action="store_true", help="run also when this very run exists")
    option("--quiet", action="store_true", help="no progress bar")
    share(made, "--notebooks", "--runs", "--evidence")
    command(commands, runs, "--json", "--runs")
    command(commands, keep, "run", "--runs", under="runs")
    command(commands, show, "run", "--runs")
    command(commands, report, "run", "--runs")
    command(commands, env, "--json")
    made = command(commands, init, under="notebooks")
    made.add_argument("folder", metavar="FOLDER", help="made where it is not there")


def notebooks(arguments) -> int:
    """List the notebooks, their questions and parameters."""
    from workbook.runs import identity, parameters

    found = identity.notebooks(arguments.notebooks)
    if not found:
        raise ValueError(f"no notebooks in {arguments.notebooks}; name their folder: --notebooks")
    for path in found:
        print(f"{path.stem}\n  {identity.question(path)}")
        try:
            print(parameters.table(parameters.declared(path)))
        except ValueError as error:
            print(f"    (cannot be run: {error})")
    print(f"\nThey lie in {arguments.notebooks}, and runs go to {arguments.runs}.")
    return GOOD


def init(arguments) -> int:
    """Copy the notebooks and their parameter files into a folder of your own, for you to change;
    runs started below it are stored there as well."""
    from workbook.runs import places

    made = places.init(arguments.folder)
    files = len(list(made.glob("params/*.yaml")))
    print(f"{len(list(made.glob('*.ipynb')))} notebooks and {files} files of parameters in {made}")
    print(f"next: cd {arguments.folder} && nsa run memory_scaling")
    return GOOD


def run(arguments) -> int:
    """Run a notebook into a dated folder: checked parameters, live log, HTML report."""
    from workbook.runs import identity, parameters, places

    path = identity.find_notebook(arguments.notebook, arguments.notebooks)
    declared = parameters.declared(path)
    given = {}
    for file in arguments.file:
        given.update(parameters.read_file(places.parameter_file(file, arguments.notebooks)))
    for text in arguments.parameter:
        name, value = pair(text, "-p tokens=512")
        known = declared.get(name)
        given[name] = parameters.parse(value, known.type) if known else value
    given = parameters.check(declared, given)
    parameters.check_backends(given)

    # They load torch, which takes seconds: a wrong value is refused before.
    from workbook.runs import store
    from workbook.runs.run import run_notebook

    result = run_notebook(
        path,
        given,
        root=arguments.runs,
        timeout_s=arguments.timeout,
        cell_timeout_s=arguments.cell_timeout,
        again=arguments.again,
        evidence=arguments.evidence,
        progress=not arguments.quiet,
        say=lambda text: print(text, file=sys.stderr),
    )
    _print_run(store.Run(result.folder), result.status, result.message)
    print(f"  report   {result.report or 'none'}")
    return GOOD if result.good else FAILED


def runs(arguments) -> int:
    """List the runs, oldest first: how each ended, for how long, where and of which commit."""
    from workbook.runs.files import plain
    from workbook.runs.report import lasted
    from workbook.runs.store import Store

    table = Store(arguments.runs).runs()
    if arguments.json:
        print(json.dumps(plain(table.to_dict("records")), indent=2))
    elif len(table):
        rows = table.astype(object).fillna("").to_dict("records")
        print(_fitted([[r["run"], _ended(r), lasted(r["seconds"]), r["device"], r["commit"]]
                       for r in rows]))  # fmt: skip
    else:
        print(f"no runs in {arguments.runs}")
    return GOOD


HEADS = ["run", "ended", "lasted", "measured on", "commit"]
WIDEST = 100  # columns of a terminal that a table fits


def _ended(row: dict) -> str:
    """Verdict of a run that ended well, else its status."""
    return (row["verdict"] if row["status"] == "ok" else row["status"]) or "ok"


def _fitted(rows: list[list[str]]) -> str:
    """Table of runs, WIDEST wide: commits are cut to 8 digits, and the devices to what is left."""
    from workbook.lab.search.candidates import text

    rows = [[*row[:3], re.sub("NVIDIA |: .*", "", row[3]), row[4][:8]] for row in rows]
    widths = [max(map(len, column)) for column in zip(HEADS, *rows, strict=True)]
    others = sum(widths) - widths[3] + 2 * (len(widths) - 1)
    room = max(WIDEST - others, len(HEADS[3]))
    for row in rows:
        row[3] = row[3] if len(row[3]) <= room else row[3][: room - 3] + "..."
    return text([dict(zip(HEADS, row, strict=True)) for row in rows])


def show(arguments) -> int:
    """Show one run: how it ended, its verdicts, parameters and files."""
    from workbook.runs.loaded import StoredRun
    from workbook.runs.record import load, status_now
    from workbook.runs.store import Run, Store

    found = Run(Store(arguments.runs).find(arguments.run))
    record = load(found.folder)
    status = status_now(record)
    _print_run(found, status, record.get("message", ""))
    seconds = record.get("seconds")
    lasted = "" if seconds is None else f", {seconds} s"
    print(f"  started  {record.get('started')}{lasted}")
    print(f"  rows     {len(found.metrics())} in metrics.csv")
    stored = StoredRun(found.folder, record)
    print("\n".join(f"  note     {line}" for line in (str(stored.age()), *stored.labels)))
    parameters = found.folder / "parameters.yaml"
    if parameters.is_file():
        print("  parameters\n    " + parameters.read_text().strip().replace("\n", "\n    "))
    failing = any(entry.get("verdict") == "FAIL" for entry in found.verdicts())
    return GOOD if status in ("ok", "running") and not failing else FAILED


def keep(arguments) -> int:
    """Make a run small and add its evidence to git: its records, and the trials that its sentences
    name."""
    from workbook.runs import keep
    from workbook.runs.store import Store

    folder = Store(arguments.runs).find(arguments.run)
    for line in keep.keep(folder):
        print(line)
    return GOOD


def env(arguments) -> int:
    """Show the environment that a run would record on this machine."""
    from workbook.runs.environment import snapshot

    facts = snapshot()
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return GOOD
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key}={item}" for key, item in value.items()) or "none"
        elif isinstance(value, list):
            value = "; ".join(" ".join(map(str, item.values())) for item in value) or "none"
        print(f"{name:14} {'none' if value is None else value}")
    return GOOD


def report(arguments) -> int:
    """Rewrite a run's HTML report, and the page of all runs."""
    from workbook.runs.report import index, render
    from workbook.runs.store import Store

    folder = Store(arguments.runs).find(arguments.run)
    if (folder / "job.json").is_file():  # a run of `nsa train`
        from workbook.rooms.training.report import render
    print(render(folder))
    print(index(arguments.runs))
    return GOOD


def _print_run(run, status: str, message: str) -> None:
    """Print how a run ended, with its verdicts and its folder."""
    print(f"{run.id}: {status}")
    if message:
        print(f"  reason   {message}")
    for entry in run.verdicts():
        print(f"  {entry['verdict']:<14} {entry['claim']}")
    if devices := run.devices():
        print(f"  measured on {devices}")
    print(f"  folder   {Path(run.folder)}")
