"""The tools that are compared: how each is started beside a program, and what it said.

A tool's `look` is called a few times a second and returns what it has told until now: a list of
Told, of which those with a verdict have `names` set.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

from hang_runs import ROOT, text

HERE = pathlib.Path(__file__).parent
VERDICT = re.compile(r"\b(HANG|STALLED)\b(:[a-z][a-z _-]*[a-z])?")
RETRACTED = re.compile(r"withdrawn|moves again|works on it again")
LATER = 20.0  # seconds after the fault, when somebody looks by hand


@dataclasses.dataclass
class Told:
    """Something that a tool said: seconds of the clock, the label, and its first three lines."""

    at: float
    label: str
    head: str
    names: bool = True


class Watch:
    """`whyhung watch -- COMMAND`: lines on stderr, and a page in its folder."""

    name = "nsa"

    def __init__(self, options):
        self.start = options.nsa.split()

    def command(self, command, program, folder):
        return [*self.start, "watch", "--folder", str(folder / "nsa"), "--", *command]

    def environment(self, folder):
        return {}

    def begin(self, run, program):
        self.told, self.seen, self.retracted = [], 0, 0

    def look(self, run):
        lines = run.err().split("\n")[:-1]
        for number in range(self.seen, len(lines)):
            line = lines[number]
            if not line.startswith(("nsa ", "whyhung ")):
                continue
            if RETRACTED.search(line):
                self.retracted += 1
            elif found := VERDICT.search(line):
                head = "\n".join(lines[number : number + 3])
                self.told.append(Told(time.monotonic(), found[0], head))
                self.line = head
        self.seen = len(lines)
        if self.told and time.monotonic() < self.told[-1].at + 3:  # its page comes a bit later
            self.read_page(self.told[-1], text(run.folder / "nsa" / "report.txt"))
            (run.folder / f"told-{len(self.told) - 1}.txt").write_text(self.told[-1].head)
        return self.told

    def read_page(self, told, page):
        """Takes the page's first three lines, and its label where it is of the same verdict."""
        lines = page.split("\n")
        labels = [each for each in VERDICT.finditer("\n".join(lines[:8])) if each[2]]
        if labels and labels[0][1] == told.label.partition(":")[0]:
            told.label = labels[0][0]
        told.head = "\n".join([self.line, *lines[:3]])

    def close(self, run):
        pass


class ByHand:
    """Somebody looks once, 20 s after the fault or after a healthy one became quiet."""

    retracted = 0

    def __init__(self, options):
        self.start = options.nsa.split()

    def command(self, command, program, folder):
        return command

    def environment(self, folder):
        return {}

    def begin(self, run, program):
        self.told, self.program = [], program

    def look(self, run):
        mark = run.marks.get("quiet" if self.program.healthy else "fault")
        scale = float(os.environ.get("HANGS_SCALE", 1)) if self.program.healthy else 1
        if mark and not self.told and time.monotonic() > mark + LATER * scale:
            self.told.append(self.read(run))
        return self.told

    def close(self, run):
        pass


class Attach(ByHand):
    """`whyhung attach --all-ranks PID`."""

    name = "attach"

    def read(self, run):
        folder = str(run.folder / "attach")
        command = [*self.start, "attach", "--all-ranks", "--folder", folder, str(run.pid)]
        code, said = output(command, run.folder / "attach.txt")
        lines = said.split("\n")
        labels = list(VERDICT.finditer("\n".join(lines[:8])))
        label = next((each for each in labels if each[2]), labels[0] if labels else None)
        head = "\n".join(lines[:3])
        return Told(time.monotonic(), label[0] if label else f"exit {code}", head, code == 1)


class PySpy(ByHand):
    """`py-spy dump` of every Python process: stacks to read, and no verdict."""

    name = "py-spy"

    def read(self, run):
        found = shutil.which("py-spy") or str(pathlib.Path(sys.executable).parent / "py-spy")
        stacks = []
        for pid in run.family():
            code, said = output([found, "dump", "--pid", str(pid)], None)
            if code == 0 or said:
                rank = re.search(r"(?:^|\0)RANK=(\d+)", text(f"/proc/{pid}/environ"))
                stacks.append(f"rank {rank[1]}\n{said}" if rank else said)
        every = "\n".join(stacks)
        (run.folder / "py-spy.txt").write_text(every)
        return Told(time.monotonic(), f"{len(every.splitlines())} lines", every, False)


def recorded(folder):
    """Returns the environment in which NCCL's Flight Recorder writes its dumps into a folder."""
    dumps = folder / "dumps"
    dumps.mkdir(parents=True)
    names = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    sizes = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
    return {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / "dump_"),
        **dict.fromkeys(names, str(dumps / "rank_")),
        **dict.fromkeys(sizes, "2000"),
    }


def traced(run):
    """Returns what torchfrtrace says of a run's dumps, without those that it only expects."""
    dumps = run.folder / "dumps"
    if not any(dumps.iterdir()):
        return ""
    module = "torch.distributed.flight_recorder.fr_trace"
    command = [sys.executable, "-m", module, str(dumps), "-p", "rank_"]
    path = run.folder / "fr_trace.txt"
    said = output([*command, "--allow-incomplete-ranks", "--print_stack_trace"], path)[1]
    return re.sub(r"(?m)^expected ranks:.*$", "", said)


class FlightRecorder(ByHand):
    """Somebody asks each rank for a dump of the Flight Recorder, and reads it by torchfrtrace."""

    name = "frtrace"

    def environment(self, folder):
        return recorded(folder)

    def read(self, run):
        for pipe in run.folder.glob("dump_*.pipe"):
            with contextlib.suppress(OSError):  # nobody reads it in a rank that is gone
                os.write(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), b"1")
        time.sleep(5)
        return self.read_dumps(run)

    def read_dumps(self, run):
        said = traced(run)
        odd = re.search(r"(?i)missing ranks|mismatch|not all ranks|error", said)
        return Told(time.monotonic(), odd[0] if odd else "no finding", said, bool(odd))


class Resiliency(FlightRecorder):
    """The analyzer of such dumps in NVIDIA's resiliency extension: it names missing ranks."""

    name = "nvrx"
    MODULE = "nvidia_resiliency_ext.attribution.trace_analyzer.fr_attribution"

    def read_dumps(self, run):
        dumps = str(run.folder / "dumps")
        command = [sys.executable, "-m", self.MODULE, "--fr-path", dumps, "-p", "rank_*"]
        said = output(command, run.folder / "nvrx.txt")[1]
        if "No module named" in said:
            return Told(time.monotonic(), "not installed", "", False)
        missing = said.rpartition("Missing Ranks")[2] if "Missing Ranks" in said else ""
        ranks = re.findall(r"\| *([\d,]+) *$", missing, re.MULTILINE)
        head = f"ranks {', '.join(','.join(ranks).split(','))}" if ranks else ""
        return Told(time.monotonic(), head or "no finding", head, bool(ranks))


class Torch:
    """Torch's own timeouts, set to `--timeout` seconds, and torchfrtrace on what they dump."""

    name = "torch"
    retracted = 0
    FIRED = re.compile(r"[Tt]imed out|imeout was reached|operation timeout|[Tt]imeout waiting")

    def __init__(self, options):
        self.seconds = options.timeout

    def command(self, command, program, folder):
        at = command.index(str(program.path))
        return [*command[:at], str(HERE / "with_timeouts.py"), *command[at:]]

    def environment(self, folder):
        return {"HANGS_TIMEOUT": str(self.seconds), **recorded(folder)}

    def begin(self, run, program):
        self.told = []

    def look(self, run):
        if not self.told and self.FIRED.search(run.err()):
            self.told.append(Told(time.monotonic(), "timeout", ""))
        return self.told

    def close(self, run):
        """Reads all that torch printed, and what torchfrtrace says of the dumps."""
        said = run.err() + traced(run)
        for told in self.told:
            told.head = re.sub(
                r"(?m)^.*?\[rank\d+\]:?", "", said
            )  # who prints is not who is guilty


def output(command, path, limit=180):
    """Returns the exit code of a command and what it printed; `path` keeps it."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, cwd=ROOT, errors="replace"
        )
        code, said = done.returncode, done.stdout + done.stderr
    except (subprocess.TimeoutExpired, OSError) as error:
        code, said = -1, f"{type(error).__name__}: {error}"
    if path:
        path.write_text(said)
    return code, said


EVERY = Watch, Attach, PySpy, FlightRecorder, Resiliency, Torch
TOOLS = {tool.name: tool for tool in EVERY}
