"""`nsa watch` and `nsa attach`: anybody's command, started under watch or looked at as it runs."""

import argparse
import sys
from pathlib import Path

from nsa.cli.options import FAILED, GOOD, command, duration

NOT_FOUND, NOT_ALLOWED = 127, 126  # as a shell has them


def add(commands) -> None:
    """Their parsers."""
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
        print(f"nsa: {line[0]}: command not found", file=sys.stderr)
        return NOT_FOUND
    except OSError as error:
        print(f"nsa: {line[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return NOT_ALLOWED
    return as_it_ended(code)


def attach(arguments) -> int:
    """Look at a job that runs already, and report what each rank does or waits for; changes nothing
    of it. Exit code 0 if nothing stands still, 1 if something does, 2 for bad input."""
    from whyhung.process.attaching import attach as look
    from whyhung.process.reports import Reports
    from whyhung.verdict.explain import page

    evidence, verdict = look(
        arguments.pid, all_ranks=arguments.all_ranks, seconds=arguments.seconds
    )
    print(page(evidence, verdict, markdown=arguments.markdown), end="")
    if arguments.folder:
        Reports(Path(arguments.folder), "nsa attach").write(evidence, verdict)
    return FAILED if verdict.kind in ("STALLED", "HANG") else GOOD
