"""The command line: parse, call one function, print. Exit code 0 good, 1 failed, 2 bad input."""

import argparse
import os
import sys

from nsa.cli import batch, bench, dtypes, figures, notebooks, selfcheck, site, train, trials, watch
from nsa.cli.options import BAD_INPUT, FAILED, GOOD


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; a wrong request prints one line to stderr."""
    arguments = parser().parse_args(argv)
    try:
        code = arguments.command(arguments)
        sys.stdout.flush()  # here, where a reader that is gone can still be caught
        return code
    except (ValueError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and "pip install" not in str(error):
            error = f"{error.name} is not installed; pip install 'nsa[notebooks]' brings it"
        print(f"nsa: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # `nsa runs | head`
        # what is still buffered would fail once more when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
    except KeyboardInterrupt:
        print("nsa: interrupted", file=sys.stderr)
        return FAILED


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="nsa",
        description="Run the workbook's notebooks, look at what they found, train its models.",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for family in (notebooks, figures, site, batch, bench, train, dtypes, trials, watch, selfcheck):
        family.add(commands)
    return top
