"""`nsa rm` and `nsa runs prune`: removal of runs. Runs that git tracks always stay."""

import argparse
import json
import re
import sys
from contextlib import suppress
from pathlib import Path

from workbook.cli.options import BAD_INPUT, FAILED, GOOD, command, share

DAY_S = 86400
DAY = re.compile(r"\d{4}-\d\d-\d\d")


def age(text: str) -> float:
    """`12h`, `30d`, `8w` in seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([hdw])\s*", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no age; write 12h, 30d or 8w")
    return float(found[1]) * {"h": DAY_S / 24, "d": DAY_S, "w": 7 * DAY_S}[found[2]]


def add(commands) -> None:
    """Add the parsers."""
    made = command(commands, prune, "--json", "--runs", under="runs")
    text = "what began longer ago: 12h, 30d, 8w"
    made.add_argument("--older", type=age, metavar="AGE", required=True, help=text)
    made.add_argument("--yes", action="store_true", help="remove them, and not only name them")
    made = command(commands, rm)
    text = "ids, their beginnings, paths, or latest; what git tracks is refused"
    made.add_argument("names", nargs="+", metavar="RUN", help=text)
    share(made, "--runs")


def prune(arguments) -> int:
    """List the old runs that git does not track, or remove them with --yes."""
    from workbook.runs import retention

    going = retention.older(arguments.runs, arguments.older)
    days = {folder: age / DAY_S for folder, age in going.items()}
    if arguments.json:
        rows = [{"run": str(folder), "age_days": round(n, 2)} for folder, n in days.items()]
        print(json.dumps(rows, indent=2))
    else:
        print("".join(f"{folder}  {n:6.1f} days\n" for folder, n in days.items()), end="")
    text = f"{len(going)} runs {'go' if arguments.yes else 'may go'}; what git tracks stays"
    print(text, file=sys.stderr)
    if not arguments.yes:
        if going:
            print("nothing was removed; --yes removes them", file=sys.stderr)
        return GOOD
    return _remove([*retention.leftovers(arguments.runs), *going], arguments.runs)


def rm(arguments) -> int:
    """Remove runs for good. If git tracks one of them, nothing is removed."""
    from workbook.runs import retention
    from workbook.runs.store import Store

    folders = [_folder(Store(arguments.runs), name) for name in arguments.names]
    kept = retention.tracked(arguments.runs)
    if refused := [folder for folder in folders if folder.resolve() in kept]:
        for folder in refused:
            print(f"nsa: {folder}: git tracks it; git rm -r removes it", file=sys.stderr)
        return BAD_INPUT
    return _remove(list(dict.fromkeys(folders)), arguments.runs)


def _folder(store, name: str) -> Path:
    """Folder of a run; a path in a day's folder below the runs' root needs no record."""
    place = Path(name)
    day = place.resolve().parent
    if place.is_dir() and day.parent == store.root.resolve() and DAY.fullmatch(day.name):
        return place
    return store.find(name)


def _remove(folders: list[Path], root: str) -> int:
    """Remove each folder; one that cannot be removed is reported, and the others are removed."""
    failed = [folder for folder in folders if not _gone(folder)]
    if (Path(root) / "index.html").is_file():
        from workbook.runs.report import index

        with suppress(ModuleNotFoundError, OSError):
            index(root)
    return FAILED if failed else GOOD


def _gone(folder: Path) -> bool:
    from workbook.runs import retention

    try:
        retention.remove(folder)
    except (OSError, ValueError) as error:
        print(f"nsa: {folder} stays: {error}", file=sys.stderr)
        return False
    print(f"removed {folder}")
    return True
