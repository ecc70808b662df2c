"""`nsa site`: all runs as pages that need no network."""

import sys
import time
from collections.abc import Callable

from workbook.cli.options import GOOD, command


def add(commands) -> None:
    """Add the parser."""
    made = command(commands, site, "--runs")
    made.add_argument("--to", metavar="DIR", default="site", help="folder; default: site")
    text = "only runs that git tracks, as a fresh clone has them"
    made.add_argument("--committed", action="store_true", help=text)


def site(arguments) -> int:
    """Write a site of all runs: backends by T, what fits a GPU, a sortable and filterable table of
    runs, each run's notebook, and a page that compares runs. Pages of unchanged runs are kept."""
    from workbook.runs import results
    from workbook.runs.site.build import build

    folders = results.committed(arguments.runs) if arguments.committed else None
    say = _on_one_line if sys.stderr.isatty() else _now_and_then()
    made = build(arguments.runs, arguments.to, folders=folders, say=say)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    for line in made.warnings:
        print(line, file=sys.stderr)
    print(f"{made.index}  {made.runs} runs, {made.written} of them new or changed")
    return GOOD


SECONDS = 5.0  # between two lines of progress in a log


def _on_one_line(text: str) -> None:
    print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)


def _now_and_then() -> Callable[[str], None]:
    said = time.monotonic()

    def say(text: str) -> None:
        nonlocal said
        if time.monotonic() - said >= SECONDS:
            said = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    return say
