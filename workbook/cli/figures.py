"""`nsa runs figures`: the headline plots, each redrawn from the newest run that has its rows."""

import contextlib
import importlib
import json
import math
import os
import subprocess
from pathlib import Path

from workbook.cli.options import FAILED, GOOD, command, share
from workbook.runs import metrics, places

HEAD = """\
# Figures

Written by `nsa runs figures`, by hand never: each is drawn from the records of the newest committed
run that has what it shows, by the rules of [figures.yaml]({rules}), and names that run at its foot.
`nsa run` puts the plots of the latest good run here as well, as `<notebook>--<plot>`; those are not
in git.
"""
RULES = Path(__file__).with_suffix(".yaml")


def add(commands) -> None:
    """Add the parser."""
    made = command(commands, figures, under="runs")
    text = "their folder; default: %(default)s"
    made.add_argument("--to", metavar="DIR", default=places.beside("figures"), help=text)
    text = "of all runs that ended; default: of those that git tracks, where it tracks any"
    made.add_argument("--all", action="store_true", help=text)
    share(made, "--runs")


def figures(arguments) -> int:
    """Redraw the headline plots, each from the newest run that has its rows, and the page that
    names the run of each."""
    import yaml

    from workbook.runs.files import write_atomically
    from workbook.runs.results import Stored

    root, every = Path(arguments.runs), arguments.all
    stored = Stored(file.parent for file in kept(root, "*/*/record.json", every))
    if not stored.runs:
        raise ValueError(f"no run below {arguments.runs} has ended; start one with `nsa run`")
    target, drawn, missing = Path(arguments.to), {}, {}
    target.mkdir(parents=True, exist_ok=True)
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    for name, rule in rules.items():
        if "records" in rule:
            found = kept(root, f"*/{rule['records']}.json", every)
            wanted, of = f"record {rule['records']} in {arguments.runs}", f"{len(found)} records"
        else:
            found = next((run for run in stored.of(rule["notebook"]) if fits(run, rule)), None)
            wanted = f"run of {rule['notebook']} has its rows"
            of = found and f"run {found.folder.name}"
        if not found:
            missing[name] = rule
            print(f"{name}: no {wanted}; {rule['command']}")
            continue
        drawn[name] = found
        print(f"{name}: {', '.join(map(str, draw(name, rule, found, target)))} of {of}")
    text = page({name: rules[name] for name in drawn}, drawn, missing, arguments.runs, target)
    print(write_atomically(target / "README.md", text))
    return GOOD if drawn else FAILED


def fits(run, rule: dict) -> bool:
    """Return True if a run has all values of the rule, in rows of its metric with a median."""
    rows = [r for r in run.rows if r["metric"] == rule["metric"] and math.isfinite(r["median"])]
    if rule.get("gpu", True):
        rows = [row for row in rows if metrics.is_gpu(row["device"])]
    there = [{**row["config"], **{k: v for k, v in row.items() if v != ""}} for row in rows]
    has = all(
        {row.get(column) for row in there} >= set(values) for column, values in rule["has"].items()
    )
    return bool(rows) and has and (run.folder / rule.get("file", "metrics.csv")).is_file()


def kept(runs: Path, pattern: str, every: bool = False) -> list[Path]:
    """Return the records that fit the pattern, oldest first: those that git tracks; all of them if
    it tracks none, or if `every` is set."""
    from workbook.runs.files import tracked_files

    found = sorted(runs.glob(pattern))
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no checkout
        tracked = {runs / name for name in tracked_files(runs, "*.json")}
        if not every and tracked & set(found):
            return [file for file in found if file in tracked]
    return found


def draw(name: str, rule: dict, found, target: Path) -> list[Path]:
    """Draw the figure of a run, or of a list of records, and return its files."""
    import matplotlib.pyplot as plt

    from workbook.runs import looks

    figure, source = (_of_records if "records" in rule else _of_run)(rule, found)
    try:
        return looks.write(figure, target, name, source, ("png", "svg"))
    finally:
        plt.close(figure)


def _of_records(rule: dict, files: list[Path]):
    read = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return _named(rule["plot"])(read), f"records {', '.join(file.stem for file in files)}"


def _of_run(rule: dict, run):
    import inspect

    from workbook.runs.store import Run

    stored = Run(run.folder)
    plot, shown = _named(rule["plot"]), stored.metrics()
    if "read" in rule:
        shown = _named(rule["read"])(run.folder)
    given = dict(rule.get("arguments", {}))
    if "note" in inspect.signature(plot).parameters:
        given["note"] = stored.devices()
    return plot(shown, **given), stored.source()


def _named(place: str):
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def page(rules: dict, drawn: dict, missing: dict, runs: str, target: Path) -> str:
    """figures/README.md as text: each figure under its question, with the run it was drawn from."""
    from workbook.runs.store import Run

    def to(path) -> str:
        return Path(os.path.relpath(path, target)).as_posix()

    lines = [HEAD.format(rules=to(RULES))]
    for name, rule in rules.items():
        if "records" in rule:
            of = ", ".join(f"[{file.stem}]({to(file)})" for file in drawn[name])
        else:
            folder = drawn[name].folder
            of = f"[{folder.name}]({to(folder)}), {Run(folder).source().partition(', ')[2]}"
            if (status := drawn[name].record.get("status")) != "ok":
                of += f", which ended as {status}"
        lines += [
            f"## {rule['title']}\n",
            f"![{rule['shows']}]({name}.svg)\n",
            f"{rule['read_it']} [PNG]({name}.png)\n",
            f"{of}; `{rule['command']}`\n",
        ]
    if missing:
        lines += ["## Not drawn\n"]
        lines += [f"- {rule['title']} Wants `{rule['command']}`." for rule in missing.values()]
    return "\n".join(lines).rstrip() + "\n"
