"""`nsa notebooks` and `nsa run`: what can be run, and running it."""

import sys

from nsa.cli.options import FAILED, GOOD, command, duration, runs_option
from nsa.cli.runs import print_run
from nsa.spelling import pair


def add(commands) -> None:
    """The parsers of both."""

    def notebooks_option(made) -> None:
        made.add_argument("--notebooks", default="notebooks", metavar="DIR", help="where they lie")

    listed = command(
        commands, "notebooks", notebooks, "List the notebooks, their questions and parameters."
    )
    notebooks_option(listed)

    run_text = "Run a notebook into a dated folder: checked parameters, live log, HTML report."
    made = command(commands, "run", run, run_text)
    made.add_argument("notebook", metavar="NAME", help="name, number, part of the name, or path")
    made.add_argument(
        "-p",
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one parameter, lists as 128,256; wins over a file's",
    )
    made.add_argument(
        "-f",
        "--file",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file of parameters; later files win",
    )
    made.add_argument(
        "--timeout",
        type=duration,
        metavar="TIME",
        help="for the whole notebook, whose budgets end before it: 90, 90s, 20m, 2h",
    )
    made.add_argument(
        "--cell-timeout", type=duration, metavar="TIME", help="for each cell: 90, 90s, 20m, 2h"
    )
    made.add_argument("--again", action="store_true", help="run also when this very run exists")
    made.add_argument("--quiet", action="store_true", help="no progress bar")
    notebooks_option(made)
    runs_option(made)


def notebooks(arguments) -> int:
    from nsa.workbook import identity, parameters

    found = identity.notebooks(arguments.notebooks)
    if not found:
        raise ValueError(f"no notebooks in {arguments.notebooks}; name their folder: --notebooks")
    for path in found:
        print(f"{path.stem}\n  {identity.question(path)}")
        try:
            print(parameters.table(parameters.declared(path)))
        except ValueError as error:
            print(f"    (cannot be run: {error})")
    return GOOD


def run(arguments) -> int:
    from nsa.workbook import identity, parameters, store
    from nsa.workbook.run import run_notebook

    path = identity.find_notebook(arguments.notebook, arguments.notebooks)
    declared = parameters.declared(path)
    given = {}
    for file in arguments.file:
        given.update(parameters.read_file(file))
    for text in arguments.parameter:
        name, value = pair(text, "-p tokens=512")
        known = declared.get(name)
        given[name] = parameters.parse(value, known.type) if known else value
    result = run_notebook(
        path,
        given,
        root=arguments.runs,
        timeout_s=arguments.timeout,
        cell_timeout_s=arguments.cell_timeout,
        again=arguments.again,
        progress=not arguments.quiet,
        say=lambda text: print(text, file=sys.stderr),
    )
    print_run(store.Run(result.folder), result.status, result.message)
    print(f"  report   {result.report or 'none'}")
    return GOOD if result.good else FAILED
