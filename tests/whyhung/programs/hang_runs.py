"""One run of a program: its processes, its marks, and its end.

A program prints `fault` when its hang begins, and a healthy one `quiet` and `over` around its
quiet time.
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[3]
MARKS = "fault", "quiet", "over"
SHELL = "sh", "-c", '"$@"; exit $?', "sh"  # as users have one above; tools climb no further
LAST_TO_END = "resource_tracker", "torch_shm_manager"  # they take away what the others leave


def text(path):
    """Returns a file's text, or none where it cannot be read."""
    try:
        return pathlib.Path(path).read_text(errors="replace")
    except OSError:
        return ""


def parents():
    """Returns the parent of every process."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = text(f"/proc/{entry}/stat").rpartition(")")[2].split()
            if len(fields) > 1 and fields[0] not in "ZX":
                found[int(entry)] = int(fields[1])
    return found


class Run:
    """A command in a session and a temporary folder of its own.

    Args:
        command: list of str.
        folder: for what it printed (out.txt, err.txt), and for a tool's evidence.
        environment: what is set for it beside the scorer's own.
    """

    def __init__(self, command, folder, environment):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.place = tempfile.mkdtemp(prefix="hang-")
        self.mark = uuid.uuid4().hex
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        ours = {"HANGS_RUN": self.mark, "TMPDIR": self.place, "PYTHONPATH": path}
        self.marks, self.members = {}, set()
        self.started = time.monotonic()
        with open(self.folder / "out.txt", "w") as out, open(self.folder / "err.txt", "w") as err:
            self.process = subprocess.Popen(
                [*SHELL, *command],
                cwd=self.place,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment, **ours},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def look(self):
        """Notes the marks that it printed since, and returns the exit code or None."""
        code = self.process.poll()
        printed = self.out()
        for mark in MARKS:
            if mark not in self.marks and re.search(rf"^{mark}$", printed, re.MULTILINE):
                self.marks[mark] = time.monotonic()
        return code

    def out(self):
        return text(self.folder / "out.txt")

    def err(self):
        return text(self.folder / "err.txt")

    @property
    def pid(self):
        """The command's own process, below the shell, or None once it has ended."""
        return next((pid for pid, above in parents().items() if above == self.process.pid), None)

    def family(self):
        """Returns the processes that live of all that it started, its own first."""
        above = parents()
        members = {self.process.pid} & set(above)
        grown = True
        while grown:
            more = {pid for pid, parent in above.items() if parent in members}
            grown, members = bool(more - members), members | more
        for pid in set(above) - members:
            try:
                environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if f"HANGS_RUN={self.mark}".encode() in environment:
                members.add(pid)
        return sorted(members, key=lambda pid: (pid != self.process.pid, pid))

    def end(self, patience=5.0):
        """Asks the command to end, waits, and kills by pid what of the family still lives."""
        if pid := self.pid:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.kill(pid, signal.SIGTERM)
                self.process.wait(patience)
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < 30:
            members = self.family()
            if not members:
                break
            for pid in members:
                spared = any(name in text(f"/proc/{pid}/cmdline") for name in LAST_TO_END)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if waited > 2 or not spared:
                        os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)  # a zombie belongs to no family, but is ours to collect
        shutil.rmtree(self.place, ignore_errors=True)
