"""The command line: parse, call one function, print. Exit code 0 good, 1 failed, 2 bad input."""

import argparse
import contextlib
import os
import re
import sys
from pathlib import Path

import nsa
from workbook.cli import (
    batch,
    bench,
    dtypes,
    estimate,
    figures,
    generate,
    notebooks,
    retention,
    selfcheck,
    site,
    train,
    trials,
)
from workbook.cli.options import BAD_INPUT, FAILED, GOOD

# Modules whose distribution has another name.
ALIASES = {"yaml": "pyyaml", "jinja2": "nbconvert", "bs4": "nbconvert"}

# Commands of earlier versions, and their replacements.
GONE = {
    "judge": "nsa site shows every claim with its run's own verdict, device, commit and age",
    "results": "nsa site --committed writes every claim of the committed runs to claims.html",
    "keep": "write nsa runs keep RUN",
    "figures": "write nsa runs figures",
    "runs --prune": "write nsa runs prune --older AGE",
    "runs --older": "write nsa runs prune --older AGE",
    "init": "write nsa notebooks init FOLDER",
    "sweep": "write nsa trial sweep PLAN",
    "selfcheck": "write nsa trial selfcheck",
    "dtypes": "write nsa env dtypes WHAT",
    "decide": "write nsa explain --decide",
    "watch": "write whyhung watch -- COMMAND",
    "attach": "write whyhung attach PID",
    "dumps": "write whyhung dumps FOLDER",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; invalid input prints one line to stderr."""
    (top, commands), argv = parsers(), sys.argv[1:] if argv is None else argv
    two = " ".join(argv[:2])
    for name in (two, *argv[:1]):
        if name in GONE:
            print(f"nsa: there is no nsa {name} any more; {GONE[name]}", file=sys.stderr)
            return BAD_INPUT
    if not argv:
        top.print_help(sys.stderr)
        raise SystemExit(BAD_INPUT)
    arguments = top.parse_args([two, *argv[2:]] if two in commands else argv)
    try:
        code = arguments.command(arguments)
        sys.stdout.flush()  # here, so that a closed pipe can still be caught
        return code
    except (ValueError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and "pip install" not in str(error):
            extra = extra_with(error.name or "")
            error = f"{error.name} is not installed; pip install 'nsa[{extra}]' brings it"
        print(f"nsa: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # `nsa runs | head`
        # what is still buffered would fail again when the interpreter exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
    except KeyboardInterrupt:
        print("nsa: interrupted", file=sys.stderr)
        return FAILED


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Parser of `nsa`, and those of the commands by name (one word or two)."""
    top = argparse.ArgumentParser(
        prog="nsa",
        description="Run the workbook's notebooks, look at what they found, train its models.",
    )
    where = f"nsa {nsa.__version__} from {Path(nsa.__file__).parent}"
    top.add_argument("--version", action="version", version=where, help="show it, and end")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for family in (
        notebooks,
        retention,
        figures,
        site,
        batch,
        bench,
        train,
        generate,
        estimate,
        dtypes,
        trials,
        selfcheck,
    ):
        family.add(commands)
    return top, commands.choices


def extra_with(module: str) -> str:
    """Extra of this package that installs a module; "notebooks", the largest, for other modules."""
    from importlib import metadata

    distributions = {name.lower() for name in metadata.packages_distributions().get(module, [])}
    names = distributions | {ALIASES.get(module, module).lower().replace("_", "-")}
    with contextlib.suppress(metadata.PackageNotFoundError):
        for line in metadata.requires("nsa") or []:
            found = re.match(r"([\w.-]+).*extra == ['\"](\w[\w-]*)", line)
            if found and found[1].lower() in names:
                return found[2]
    return "notebooks"
