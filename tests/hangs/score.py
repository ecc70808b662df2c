"""Score a tool on programs that hang and on healthy ones that are quiet.

`python tests/hangs/score.py --tool nsa --set cpu --jobs 2 --out FOLDER` runs each program as it
is, beside the tool, and writes rows.json, rows.txt and what everybody printed into FOLDER. It
needs this repository, torch, and what the tool needs. A healthy program is accused when the tool
tells HANG or STALLED at any time; a hang is told from the moment when the program prints `fault`.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid

from hang_programs import chosen
from hang_runs import Run
from hang_tools import TOOLS

KEEP = 15.0  # seconds that a hang is watched on after it was told: is it withdrawn?
START = 240.0  # seconds that a program has to come to its fault, times what the load asks for
STOP, STOPPED = threading.Event(), "stopped"
COLUMNS = "program", "due", "said", "seconds", "line", "rank", "withdrawn", "note"


def named_ranks(said):
    """Returns the ranks that a text names: `rank 1`, `ranks 0, 2 and 5-7`."""
    found = set()
    for numbers in re.findall(r"\branks?[ :{\[]*((?:\d+(?:-\d+)?(?:, ?| and )?)+)", said):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", numbers):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def is_due(label, due):
    """Tells if a label is one that is due; `HANG` alone allows any kind of it."""
    return any(label == each or (":" not in each and label.startswith(each)) for each in due)


def watch(run, tool, program, options):
    """Waits until the run has ended, or has hung long enough. Returns what cut it short."""
    slow = 1 + options.load / len(os.sched_getaffinity(0))
    while True:
        code, told = run.look(), tool.look(run)  # what it says while it is ended does not count
        now, since = time.monotonic(), run.marks.get("fault")
        if STOP.is_set():
            return STOPPED
        if code is not None:
            return f"ended with {code}"
        if not program.healthy and told and since and now > told[-1].at + options.keep:
            return ""
        if since and now > since + options.seconds:
            return ""
        limit = START * slow + (program.quiet * (2 + slow) if program.healthy else 0)
        if not since and now > run.started + limit:
            return f"ended by the scorer after {limit:.0f} s"
        time.sleep(0.2)


def score(program, form, options, folder):
    """Runs one program once, and returns its row; none once the scorer is to stop."""
    if STOP.is_set():
        return None
    tool = TOOLS[options.tool](options)
    command = tool.command(program.command(form, options.ranks), program, folder)
    environment = {"HANGS_RANKS": str(options.ranks or 2), **tool.environment(folder)}
    run = Run(command, folder, environment)
    try:
        tool.begin(run, program)
        note = watch(run, tool, program, options)
        withdrawn = tool.retracted
    finally:
        run.end()
    tool.close(run)
    told = [each for each in tool.told if each.names]
    fault = run.marks.get("fault")
    heads = "\n".join(each.head for each in (told[-1:] or tool.told[-1:]))
    words = set(re.findall(r"\w+", heads))
    ranks = sorted(named_ranks(heads))
    row = {
        "program": f"{program.name} {form}".strip(),
        "group": program.group,
        "set": program.written,
        "healthy": program.healthy,
        "tool": options.tool,
        "due": " or ".join(program.due),
        "said": (told or tool.told)[-1].label if told or tool.told else "",
        "told": bool(told),
        "seconds": round(told[0].at - fault, 1) if told and fault else None,
        "within": program.within,
        "line": bool(words & set(program.lines)) if program.lines else None,
        "rank": bool(set(ranks) & set(program.guilty)) if program.guilty else None,
        "ranks": ranks,
        "right": any(is_due(each.label, program.due) for each in told),
        "withdrawn": withdrawn,
        "load": options.load,
        "head": heads[:2000],
        "note": note,
    }
    return judge_note(row, run, program)


def judge_note(row, run, program):
    """Says in the row's note whether the program did what it is there for."""
    scale = float(os.environ.get("HANGS_SCALE", 1))
    if program.healthy:
        quiet = run.marks.get("over", 0) - run.marks.get("quiet", 0)
        row["quiet"] = round(quiet, 1)
        clean = row["note"] == "ended with 0"
        short = quiet < 0.8 * program.quiet * scale
        row["note"] = f"quiet for {quiet:.0f} s only" if clean and short else row["note"]
        row["valid"] = clean and not short
    else:
        row["valid"] = "fault" in run.marks and (not row["note"] or row["tool"] == "torch")
        if "fault" not in run.marks:
            row["note"] = f"no fault; {row['note']}"
    return row


def table(rows):
    """Returns the rows as text, the worst first, and a line that sums each kind up."""
    order = sorted(rows, key=lambda row: (row["healthy"], worth(row), row["program"]))
    cells = [COLUMNS, *(cells_of(row) for row in order)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join([*lines, "", *summary(rows)])


def cells_of(row):
    """Returns a row's cells; of the labels that are due, the best one."""
    named = {True: "yes", False: "no", None: "-"}
    shown = {**row, "due": row["due"].split(" or ")[0], "line": named[row["line"]]}
    shown.update(rank=named[row["rank"]], withdrawn=row["withdrawn"] or "")
    return tuple("" if shown[column] is None else str(shown[column]) for column in COLUMNS)


def worth(row):
    """Orders rows: the worst is a healthy one accused, or a hang that was not told."""
    if row["healthy"]:
        return -bool(row["told"])
    return in_time(row) + bool(row["line"]) + row["told"]


def in_time(row):
    return row["seconds"] is not None and row["seconds"] <= row["within"]


def summary(rows):
    """Returns a line for each group and set."""
    lines = []
    for group, written, healthy in sorted({(r["group"], r["set"], r["healthy"]) for r in rows}):
        some = [
            r for r in rows if (r["group"], r["set"], r["healthy"]) == (group, written, healthy)
        ]
        fine = [r for r in some if r["valid"]]
        odd = f"; {len(some) - len(fine)} did not do what they are there for" * (some != fine)
        start = f"{group}, {written} set, "
        if healthy:
            accused = sum(r["told"] for r in some)
            lines.append(f"{start}healthy: {accused} of {len(some)} accused{odd}")
            continue
        told = [r for r in fine if r["told"]]
        times = [r["seconds"] for r in told] or [float("nan")]
        count = f"{len(told)} of {len(fine)} told, {sum(map(in_time, told))} in time"
        median = f", median {statistics.median(times):.1f} s, longest {max(times):.1f} s"
        lined = sum(bool(r["line"]) for r in fine)
        ranked = [r for r in fine if r["rank"] is not None]
        lines.append(
            f"{start}hangs: {count}{median}; line named in {lined},"
            f" rank in {sum(r['rank'] for r in ranked)} of {len(ranked)};"
            f" kind as due in {sum(r['right'] for r in fine)};"
            f" withdrawn in {sum(bool(r['withdrawn']) for r in fine)}{odd}"
        )
    return lines


@contextlib.contextmanager
def busy(count):
    """Keeps so many loops busy meanwhile."""
    loop = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(loop, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


@contextlib.contextmanager
def stoppable():
    """Lets SIGINT and SIGTERM end what was started first, and then the scorer."""
    STOP.clear()
    wanted = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: STOP.set()) for number in wanted]
    try:
        yield
    finally:
        for number, handler in zip(wanted, before, strict=True):
            signal.signal(number, handler)


def run_all(jobs, options):
    """Runs all, so many at once, and returns the rows; rows.json has them meanwhile."""
    rows = []
    with (
        stoppable(),
        busy(options.load),
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        running = []
        for program, form, i in jobs:
            name = re.sub(r"\W+", "-", f"{program.name} {form}").strip("-")
            folder = options.out / f"{name}-{options.tool}-{i}-{uuid.uuid4().hex[:6]}"
            running.append(pool.submit(score, program, form, options, folder))
        for done in concurrent.futures.as_completed(running):
            row = done.result()
            if row and STOPPED not in row["note"]:
                rows.append(row)
                print(*(f"{row[c]}" for c in COLUMNS), sep="; ", flush=True)
                (options.out / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def arguments(given=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tool", choices=TOOLS, default="nsa")
    parser.add_argument("--set", choices=("cpu", "gpu", "all"), default="cpu")
    parser.add_argument("--written", choices=("first", "late", "all"), default="all")
    parser.add_argument("--kind", choices=("hang", "healthy", "all"), default="all")
    parser.add_argument("--only", help="names of programs, comma between them", default="")
    parser.add_argument("--load", type=int, default=0, help="busy loops beside the programs")
    parser.add_argument("--pin", default="", help="cores that all run on: 0,1")
    parser.add_argument("--jobs", type=int, default=2, help="programs at once")
    parser.add_argument("--ranks", type=int, help="ranks under torchrun instead of two")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120, help="a hang lives after its fault")
    parser.add_argument("--keep", type=float, default=KEEP, help="and after it was told")
    parser.add_argument("--timeout", type=float, default=30, help="of torch's own, in seconds")
    parser.add_argument("--nsa", default=f"{sys.executable} -m whyhung", help="what watches")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("hangs"))
    parser.add_argument("--list", action="store_true", help="only list the programs")
    return parser.parse_args(given)


def main(given=None):
    options = arguments(given)
    only = [name for name in options.only.split(",") if name]
    try:
        programs = chosen(options.set, only, options.written, options.kind)
    except ValueError as error:
        sys.exit(f"score: {error}")
    jobs = [(p, form, i) for i in range(options.repeat) for p in programs for form in p.runs]
    if options.list:
        for program, form, _ in jobs:
            print(program.group, program.written, " or ".join(program.due), program.name, form)
        return
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.pin:
        os.sched_setaffinity(0, {int(core) for core in options.pin.split(",")})
    rows = run_all(jobs, options)
    (options.out / "rows.txt").write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
