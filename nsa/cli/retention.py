"""`nsa rm RUN` and `nsa runs --prune`: runs that may go, and those that must stay."""

import argparse
import json
import re
import sys
from contextlib import suppress
from pathlib import Path

from nsa.cli.options import BAD_INPUT, FAILED, GOOD, command, share, words

SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
RULES = ("older", "larger", "status", "down_to", "yes")
DAY_S = 86400
DAY = re.compile(r"\d{4}-\d\d-\d\d")


def age(text: str) -> float:
    """`12h`, `30d`, `8w` in seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([hdw])\s*", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no age; write 12h, 30d or 8w")
    return float(found[1]) * {"h": DAY_S / 24, "d": DAY_S, "w": 7 * DAY_S}[found[2]]


def size(text: str) -> int:
    """`500M`, `1GiB`, `20G` in bytes; a unit is a power of 1024."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 500M, 1GiB or 20G")
    return int(float(found[1]) * SIZES[found[2].lower()])


def options(made: argparse.ArgumentParser) -> None:
    """The options of `nsa runs` that are about pruning."""
    option = made.add_argument
    option("--prune", action="store_true", help="name the runs that may go by the rules below")
    option("--older", type=age, metavar="AGE", help="prune: began longer ago: 12h, 30d, 8w")
    text = "prune: ended so: failed, timeout, killed, interrupted, lost, ok"
    option("--status", type=words, metavar="NAME,NAME", help=text)
    option("--larger", type=size, metavar="SIZE", help="prune: takes more than 500M, 1GiB")
    text = "prune: the oldest, until all runs together take no more than 20GiB"
    option("--down-to", type=size, metavar="SIZE", help=text)
    option("--yes", action="store_true", help="prune: remove them, and not only name them")


def add(commands) -> None:
    """The parser of `nsa rm`."""
    made = command(commands, rm)
    text = "ids, their beginnings, paths, or latest"
    made.add_argument("names", nargs="+", metavar="RUN", help=text)
    text = "also what a document names; what git tracks stays"
    made.add_argument("--cited", action="store_true", help=text)
    share(made, "--runs")


def asked(arguments) -> bool:
    """Whether --prune was given. ValueError for its rules without it."""
    given = [name for name in RULES if getattr(arguments, name)]
    if given and not arguments.prune:
        name = given[0].replace("_", "-")
        raise ValueError(f"--{name} is a rule of --prune; nsa runs --prune --{name} ... goes by it")
    return arguments.prune


def prune(arguments) -> int:
    """Name what may go, or with --yes remove it; what is cited stays, whatever the rules say."""
    from nsa.workbook import retention

    rules = retention.Rules(
        tuple(arguments.status or ()), arguments.older, arguments.larger, arguments.down_to
    )
    found = retention.runs(arguments.runs)
    going = rules.choose(found)
    if arguments.json:
        rows = [
            {"run": str(run.folder), "status": run.status, "bytes": run.size}
            | {"age_days": round(run.age_s / DAY_S, 2)}
            for run in going
        ]
        print(json.dumps(rows, indent=2))
    else:
        for run in going:
            print(_line(run))
    kept = [run for run in found if run.kept]
    told = sum(run.size for run in going)
    print(
        f"{len(going)} of {len(found)} runs {'go' if arguments.yes else 'may go'}, "
        f"{_size(told)}; {len(kept)} stay whatever the rules say: they run, are in git, or are "
        "named by a document or a figure",
        file=sys.stderr,
    )
    if not arguments.yes:
        if going:
            print("nothing was removed; --yes removes them", file=sys.stderr)
        return GOOD
    for folder in retention.leftovers(arguments.runs):
        _gone(folder)
    return _remove([run.folder for run in going], arguments.runs)


def rm(arguments) -> int:
    """Remove runs for good. What runs, what git tracks, and what a document or figure names is
    refused, and then nothing is removed."""
    from nsa.workbook import retention
    from nsa.workbook.store import open_store

    folders = [_folder(open_store(arguments.runs), name) for name in arguments.names]
    found = {run.folder.resolve(): run for run in retention.runs(arguments.runs)}
    refused = []
    for folder in folders:
        why = run.kept if (run := found.get(folder.resolve())) else ""
        if why and not (arguments.cited and why.endswith("names it")):
            hint = {"it runs": "end it first", "git tracks it": "git rm -r removes it"}
            refused.append(f"{folder}: {why}; {hint.get(why, '--cited removes it all the same')}")
    if refused:
        print("".join(f"nsa: {line}\n" for line in refused), end="", file=sys.stderr)
        return BAD_INPUT
    return _remove(list(dict.fromkeys(folders)), arguments.runs)


def _folder(store, name: str) -> Path:
    """The run's folder; a path to one of a day below the runs' root may be without a record."""
    place = Path(name)
    day = place.resolve().parent
    if place.is_dir() and day.parent == store.root.resolve() and DAY.fullmatch(day.name):
        return place
    return store.find(name)


def _remove(folders: list[Path], root: str) -> int:
    """Each for itself: one that cannot be removed is told, and the others go."""
    failed = [folder for folder in folders if not _gone(folder)]
    if (Path(root) / "index.html").is_file():
        from nsa.workbook.report import index

        with suppress(ModuleNotFoundError, OSError):
            index(root)
    return FAILED if failed else GOOD


def _gone(folder: Path) -> bool:
    from nsa.workbook import retention

    bytes_of_it = retention.size_of(folder)
    try:
        retention.remove(folder)
    except (OSError, ValueError) as error:
        print(f"nsa: {folder} stays: {error}", file=sys.stderr)
        return False
    print(f"removed {folder}, {_size(bytes_of_it)}")
    return True


def _line(run) -> str:
    return f"{run.folder}  {run.status:<11} {run.age_s / DAY_S:6.1f} days  {_size(run.size):>9}"


def _size(count: float) -> str:
    units = iter(("B", "KiB", "MiB"))
    unit = next(units)
    while count >= 1000 and unit != "GiB":
        count, unit = count / 1024, next(units, "GiB")
    return f"{count:.3g} {unit}"
