"""`nsa runs`, `show`, `report` and `env`: what ran, how it ended, and where."""

import json
from pathlib import Path

from nsa.cli.options import FAILED, GOOD, command, runs_option


def add(commands) -> None:
    """The parsers of all four."""
    made = command(commands, "runs", runs, "List the runs, oldest first.")
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    runs_option(made)

    made = command(
        commands, "show", show, "Show one run: how it ended, its verdicts, parameters and files."
    )
    made.add_argument("run", metavar="RUN", help="id, its beginning, a path, or latest")
    runs_option(made)

    made = command(commands, "env", env, "Show what a run would record about this machine.")
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")

    made = command(
        commands, "report", report, "Write a run's HTML report again, and the page of all runs."
    )
    made.add_argument("run", metavar="RUN", help="id, its beginning, a path, or latest")
    runs_option(made)


def runs(arguments) -> int:
    from nsa.workbook.files import plain
    from nsa.workbook.store import open_store

    table = open_store(arguments.runs).runs()
    if arguments.json:
        print(json.dumps(plain(table.to_dict("records")), indent=2))
    elif len(table):
        shown = ["run", "status", "verdict", "seconds", "gpu", "torch", "commit"]
        print(table[shown].fillna("").to_string(index=False))
    else:
        print(f"no runs in {arguments.runs}")
    return GOOD


def show(arguments) -> int:
    from nsa.workbook.record import load, status_now
    from nsa.workbook.store import Run, open_store

    found = Run(open_store(arguments.runs).find(arguments.run))
    record = load(found.folder)
    status = status_now(record)
    print_run(found, status, record.get("message", ""))
    seconds = record.get("seconds")
    lasted = "" if seconds is None else f", {seconds} s"
    print(f"  started  {record.get('started')}{lasted}")
    print(f"  rows     {len(found.metrics())} in metrics.csv")
    parameters = found.folder / "parameters.yaml"
    if parameters.is_file():
        print("  parameters\n    " + parameters.read_text().strip().replace("\n", "\n    "))
    return GOOD if status in ("ok", "running") and not _failing(found) else FAILED


def env(arguments) -> int:
    from nsa.workbook.environment import snapshot

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
    from nsa.workbook.report import index, render
    from nsa.workbook.store import open_store

    print(render(open_store(arguments.runs).find(arguments.run)))
    print(index(arguments.runs))
    return GOOD


def print_run(run, status: str, message: str) -> None:
    """How a run ended, with its verdicts and its folder."""
    print(f"{run.id}: {status}")
    if message:
        print(f"  reason   {message}")
    for entry in run.verdicts():
        print(f"  {entry['verdict']:<12} {entry['claim']}")
    print(f"  folder   {Path(run.folder)}")


def _failing(run) -> bool:
    return any(entry.get("verdict") == "FAIL" for entry in run.verdicts())
