"""Commands for anybody's program: watch, attach, dumps and explain.

Exit code 0 good, 1 something stands still, 2 bad input; of `watch` that of the command.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

GOOD, FAILED, BAD_INPUT = 0, 1, 2
NOT_FOUND, NOT_ALLOWED = 127, 126  # as a shell has them


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; a wrong request prints one line to stderr."""
    top = argparse.ArgumentParser(prog="whyhung", description="Is it hung or slow, and who is why?")
    add(top.add_subparsers(required=True, metavar="COMMAND"))
    arguments = top.parse_args(argv)
    try:
        code = arguments.command(arguments)
        sys.stdout.flush()  # here, where a reader that is gone can still be caught
        return code
    except ValueError as error:
        print(f"whyhung: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        # What is still buffered would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
    except KeyboardInterrupt:
        print("whyhung: interrupted", file=sys.stderr)
        return FAILED


def add(commands) -> None:
    """Add the commands' parsers."""
    made = command(commands, watch)
    option = made.add_argument
    option("line", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="run as it is")
    text = "for evidence and reports; watch/DATE-NAME-ID by default"
    option("--folder", metavar="DIR", help=text)
    text = "a folder that several nodes share: each has its own in it, and reads the others'"
    option("--node-folder", metavar="DIR", help=text)
    text = "off: Python processes do not count their progress, all is seen from outside"
    option("--inside", choices=("on", "off"), default="on", help=text)
    text = "what a stall does to the command; report by default"
    option("--on-stall", choices=("report", "kill"), default="report", help=text)
    text = "what a certified hang does to the command; report by default"
    option("--on-hang", choices=("report", "kill"), default="report", help=text)
    text = "progress may rest so long until it is looked at; 5 by default"
    option("--stall-s", type=duration, default=5.0, metavar="TIME", help=text)
    option("--limit", type=duration, metavar="TIME", help="end the command after 90s, 20m or 2h")

    made = command(commands, attach)
    made.add_argument("pid", type=int, metavar="PID", help="a process, or a launcher of ranks")
    text = "look at every rank of its launch on this node"
    made.add_argument("--all-ranks", action="store_true", help=text)
    text = "how long it is looked at; 6 by default"
    made.add_argument("--seconds", type=duration, default=6.0, metavar="TIME", help=text)
    made.add_argument("--folder", metavar="DIR", help="keep evidence and reports there")
    made.add_argument("--markdown", action="store_true", help="as markdown, for a notebook")

    made = command(commands, dumps)
    text = (
        "with dumps of torch's Flight Recorder, also in folders below it; their names end in a rank"
    )
    made.add_argument("folder", metavar="FOLDER", help=text)
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")

    made = command(commands, explain)
    text = "with evidence.json, as watch and attach --folder leave it"
    made.add_argument("folder", metavar="FOLDER", help=text)
    made.add_argument("--markdown", action="store_true", help="as markdown, for a notebook")


def command(commands, function: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """A parser that calls the function of that name, whose docstring is the help."""
    text = " ".join((function.__doc__ or "").split())
    made = commands.add_parser(function.__name__, help=text, description=text)
    made.set_defaults(command=function)
    return made


def seconds(text: str | float) -> float:
    """`90`, `90s`, `20m`, `1.5h` in seconds. ValueError for what is none, or 0."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", str(text))
    units = {"": 1, "s": 1, "m": 60, "h": 3600}
    if found and (value := float(found[1]) * units[found[2]]) > 0:
        return value
    raise ValueError(f"{text!r} is no duration; write 90, 90s, 20m or 2h")


def duration(text: str) -> float:
    """`seconds` as argparse's type."""
    try:
        return seconds(text)
    except ValueError as error:  # argparse shows the words of this kind alone
        raise argparse.ArgumentTypeError(str(error)) from None


def watch(arguments) -> int:
    """Run any command as it is, and report when it stands still: at which line, and who waits for
    whom. Nothing is ended unless asked for. Exit code: that of the command."""
    from whyhung.process.watching import as_it_ended
    from whyhung.process.watching import watch as run

    line = arguments.line[1:] if arguments.line[:1] == ["--"] else arguments.line
    try:
        code = run(
            line,
            folder=arguments.folder,
            nodes=arguments.node_folder,
            count=arguments.inside == "on",
            on_stall=arguments.on_stall,
            on_hang=arguments.on_hang,
            stall_s=arguments.stall_s,
            limit_s=arguments.limit,
        )
    except FileNotFoundError:
        print(f"whyhung: {line[0]}: command not found", file=sys.stderr)
        return NOT_FOUND
    except OSError as error:
        print(f"whyhung: {line[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return NOT_ALLOWED
    return as_it_ended(code)


def attach(arguments) -> int:
    """Look at a job that runs already, and report what each rank does or waits for; changes nothing
    of it. Exit code 0 if nothing stands still, 1 if something does, 2 for bad input."""
    from whyhung.process.attaching import attach as look
    from whyhung.process.reports import Reports

    evidence, verdict = look(
        arguments.pid, all_ranks=arguments.all_ranks, seconds=arguments.seconds
    )
    code = _show(evidence, verdict, arguments.markdown)
    if arguments.folder:
        Reports(Path(arguments.folder), "whyhung attach").write(evidence, verdict)
    return code


def dumps(arguments) -> int:
    """Read the Flight Recorder dumps that a job left, and name the ranks that held it up: behind,
    absent, in another call, or with a device that never reported an end. Exit code 1 if something
    stands, 0 if nothing does, 2 if nothing can be read."""
    from whyhung.verdict import gone
    from whyhung.verdict.guilt import blame
    from whyhung.watch.dumps import read

    folder = Path(arguments.folder)
    told = read(folder)
    found = blame(told.flights, told.world, told.unread, told.moving)
    if arguments.json:
        files = {str(rank): str(file) for rank, file in sorted(told.files.items())}
        refused = {str(file): why for file, why in told.refused.items()}
        absent = sorted({*told.world} - told.flights.keys())
        print(json.dumps({**gone.to_dict(found), "files": files, "refused": refused,
                          "absent": absent, "notes": told.notes}, indent=2))  # fmt: skip
    else:
        print(gone.page(found, told), end="")
    return FAILED if found.guilty or (found.suspects and not told.moving) else GOOD


def explain(arguments) -> int:
    """Judge the evidence in a folder by today's rules, and print the page. Exit code 1 if something
    stood still, 2 if nothing can be read."""
    from whyhung.verdict import judge
    from whyhung.watch.evidence import Evidence

    file = Path(arguments.folder, "evidence.json")
    try:
        evidence = Evidence.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} holds no evidence: {error}") from None
    return _show(evidence, judge(evidence), arguments.markdown)


def _show(evidence, verdict, markdown: bool) -> int:
    """Print the page of a verdict; its exit code."""
    from whyhung.process.told import ACCUSES
    from whyhung.verdict.explain import page

    print(page(evidence, verdict, markdown=markdown), end="")
    return FAILED if verdict.kind in ACCUSES else GOOD
