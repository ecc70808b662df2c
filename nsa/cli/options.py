"""What commands share: exit codes, options, and how words on the command line are read."""

import argparse
import re
from collections.abc import Callable

GOOD, FAILED, BAD_INPUT = 0, 1, 2


def command(
    commands, name: str, function: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """A parser for `nsa NAME`, which calls `function` with the arguments and ends with its code."""
    made = commands.add_parser(name, help=text, description=text)
    made.set_defaults(command=function)
    return made


def runs_option(made: argparse.ArgumentParser) -> None:
    made.add_argument("--runs", default="runs", metavar="DIR", help="where runs are kept")


def trials_option(made: argparse.ArgumentParser) -> None:
    made.add_argument("--trials", default="trials", metavar="DIR", help="where trials are kept")


def words(text: str) -> list[str]:
    """`a,b` as ["a", "b"]."""
    return [word.strip() for word in text.split(",") if word.strip()]


def duration(text: str) -> float:
    """`90`, `90s`, `20m`, `1.5h` in seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    units = {"": 1, "s": 1, "m": 60, "h": 3600}
    seconds = float(found.group(1)) * units[found.group(2)] if found else 0
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; write 90, 90s, 20m or 2h")
    return seconds
