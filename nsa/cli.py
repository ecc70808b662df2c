"""The command line: parse, call one function, print. Exit code 0 good, 1 failed, 2 bad input."""

import argparse
import json
import os
import re
import sys
from pathlib import Path

GOOD, FAILED, BAD_INPUT = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; a wrong request prints one line to stderr."""
    arguments = parser().parse_args(argv)
    try:
        code = arguments.command(arguments)
        sys.stdout.flush()  # here, where a reader that is gone can still be caught
        return code
    except (ValueError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError):
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
        prog="nsa", description="Run the workbook's notebooks and look at what they found."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(command=function)
        return made

    def runs_option(made) -> None:
        made.add_argument("--runs", default="runs", metavar="DIR", help="where runs are kept")

    def notebooks_option(made) -> None:
        made.add_argument("--notebooks", default="notebooks", metavar="DIR", help="where they lie")

    listed = command("notebooks", notebooks, "List the notebooks, their questions and parameters.")
    notebooks_option(listed)

    run_text = "Run a notebook into a dated folder: checked parameters, live log, HTML report."
    made = command("run", run, run_text)
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
        "--timeout", type=duration, metavar="TIME", help="for the whole notebook: 90, 90s, 20m, 2h"
    )
    made.add_argument(
        "--cell-timeout", type=duration, metavar="TIME", help="for each cell: 90, 90s, 20m, 2h"
    )
    made.add_argument("--again", action="store_true", help="run also when this very run exists")
    made.add_argument("--quiet", action="store_true", help="no progress bar")
    notebooks_option(made)
    runs_option(made)

    made = command("runs", runs, "List the runs, oldest first.")
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    runs_option(made)

    made = command("show", show, "Show one run: how it ended, its verdicts, parameters and files.")
    made.add_argument("run", metavar="RUN", help="id, its beginning, a path, or latest")
    runs_option(made)

    made = command("env", env, "Show what a run would record about this machine.")
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")

    made = command("bench", bench, "Time every attention backend; accuracy is checked first.")
    made.add_argument(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help="main, small, g4, tiny, or sizes as tokens=4k,heads=32,kv_heads=8,dim=128; "
        "main on a GPU, tiny without",
    )
    made.add_argument("--tokens", type=words, default=[], metavar="T,T", help="8k,32k: other T")
    made.add_argument(
        "--backends", type=words, metavar="NAME,NAME", help="ours to run; all by default"
    )
    made.add_argument(
        "--queries",
        type=words,
        default=["random", "correlated"],
        metavar="KIND",
        help="random (white), correlated (neighbours alike), or both: the default",
    )
    made.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="PATH",
        help="import.path:function, called as f(q, k, v, gates, config) -> o [B, T, HQ, DV]",
    )
    made.add_argument("--no-dense", action="store_true", help="without dense attention")
    made.add_argument(
        "--budget", type=duration, metavar="TIME", help="what does not fit says so: 5m"
    )
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where")
    made.add_argument("--json", metavar="FILE", help="write the rows, as in metrics.csv, there")

    made = command("report", report, "Write a run's HTML report again, and the page of all runs.")
    made.add_argument("run", metavar="RUN", help="id, its beginning, a path, or latest")
    runs_option(made)
    return top


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
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"-p {text!r} has no '='; write -p name=value")
        known = declared.get(name.strip())
        given[name.strip()] = parameters.parse(value, known.type) if known else value
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
    _print_run(store.Run(result.folder), result.status, result.message)
    print(f"  report   {result.report or 'none'}")
    return GOOD if result.good else FAILED


def runs(arguments) -> int:
    from nsa.workbook.files import plain
    from nsa.workbook.store import open_store

    table = open_store(arguments.runs).runs()
    if arguments.json:
        print(json.dumps(plain(table.to_dict("records")), indent=2))
    elif len(table):
        shown = ["run", "status", "verdict", "seconds", "gpu", "torch", "commit"]
        print(table[shown].fillna("").to_string(index=False))
    else:
        print(f"no runs in {arguments.runs}")
    return GOOD


def show(arguments) -> int:
    from nsa.workbook.record import load, status_now
    from nsa.workbook.store import Run, open_store

    found = Run(open_store(arguments.runs).find(arguments.run))
    record = load(found.folder)
    status = status_now(record)
    _print_run(found, status, record.get("message", ""))
    seconds = record.get("seconds")
    lasted = "" if seconds is None else f", {seconds} s"
    print(f"  started  {record.get('started')}{lasted}")
    print(f"  rows     {len(found.metrics())} in metrics.csv")
    parameters = found.folder / "parameters.yaml"
    if parameters.is_file():
        print("  parameters\n    " + parameters.read_text().strip().replace("\n", "\n    "))
    return GOOD if status in ("ok", "running") and not _failing(found) else FAILED


def env(arguments) -> int:
    from nsa.workbook.environment import snapshot

    facts = snapshot()
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return GOOD
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key}={item}" for key, item in value.items()) or "none"
        elif isinstance(value, list):
            value = "; ".join(" ".join(map(str, item.values())) for item in value) or "none"
        print(f"{name:14} {'none' if value is None else value}")
    return GOOD


def bench(arguments) -> int:
    import torch

    gpu = torch.cuda.is_available() if arguments.device == "auto" else arguments.device == "cuda"
    if gpu and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU; --device cpu runs a tiny shape")
    if not gpu:
        # Triton reads it when it is imported: its interpreter, for numbers and not for speed.
        os.environ.setdefault("TRITON_INTERPRET", "1")

    from nsa.lab import bench_table, peers, shapes
    from nsa.lab.bench import bench as run_bench

    if arguments.json and not Path(arguments.json).resolve().parent.is_dir():
        raise ValueError(f"--json {arguments.json}: its folder does not exist; make it first")
    if arguments.json and Path(arguments.json).is_dir():
        raise ValueError(f"--json {arguments.json} is a folder; name a file")
    if os.getcwd() not in sys.path:  # `nsa` does not look there, `python -m nsa` does
        sys.path.append(os.getcwd())
    wrong = peers.wrong_paths(arguments.peer)
    if wrong:
        raise ValueError(f"--peer: {'; '.join(wrong)}")
    chosen = shapes.shapes_from(
        arguments.shapes or (["main"] if gpu else ["tiny"]),
        tokens=[shapes.count(text) for text in arguments.tokens],
        queries=arguments.queries,
    )
    cells, interrupted = [], False
    try:
        run_bench(
            chosen,
            backends=arguments.backends,
            peers=arguments.peer,
            with_dense=not arguments.no_dense,
            device="cuda" if gpu else "cpu",
            budget_s=arguments.budget,
            say=lambda line: print(line, file=sys.stderr, flush=True),
            into=cells,
        )
    except KeyboardInterrupt:
        interrupted = True
        print("nsa: interrupted; what was measured until then:", file=sys.stderr)
    print(bench_table.text(cells), flush=True)
    if arguments.json:
        from nsa.workbook import environment, metrics
        from nsa.workbook.files import plain, write_json

        facts = environment.provenance(environment.snapshot()) | {"date": environment.utc_now()}
        rows = [metrics.row(row, facts) for row in bench_table.rows(cells)]
        write_json(arguments.json, plain(rows))
    failed = [(w, line) for w in ("red", "error") for line in bench_table.ended(cells, w)]
    for how, line in failed:
        what = "NOT ACCURATE" if how == "red" else "BROKE OFF"
        print(f"{what}: {line}", file=sys.stderr)
    return FAILED if failed or interrupted else GOOD


def report(arguments) -> int:
    from nsa.workbook.report import index, render
    from nsa.workbook.store import open_store

    print(render(open_store(arguments.runs).find(arguments.run)))
    print(index(arguments.runs))
    return GOOD


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


def _failing(run) -> bool:
    return any(entry.get("verdict") == "FAIL" for entry in run.verdicts())


def _print_run(run, status: str, message: str) -> None:
    print(f"{run.id}: {status}")
    if message:
        print(f"  reason   {message}")
    for entry in run.verdicts():
        print(f"  {entry['verdict']:<12} {entry['claim']}")
    print(f"  folder   {Path(run.folder)}")
