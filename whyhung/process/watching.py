"""Run any command unmodified, watch its processes from outside, and report when they stand still.

The command has this process's terminal, files, signals and exit code; nothing of it is captured,
and it goes on if the watcher is killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from whyhung.process import family
from whyhung.process.members import Members
from whyhung.process.nodes import Nodes
from whyhung.process.observer import Observer
from whyhung.process.reports import Reports
from whyhung.verdict import judge
from whyhung.verdict.rests import cut_short, standing
from whyhung.watch import devices, inside, layout
from whyhung.watch.evidence import End, Evidence

ACTIONS = "report", "kill"
PASSED_ON = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
WAKES_S = 0.1
ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
ENDS_S = 120.0  # changes in this time after an ending signal are its effect, not progress
ARRIVES_S = 0.005  # for a signal to reach all of a process group
TERM_S = 10.0  # from SIGTERM to SIGKILL, where the user asked for an end
GPU_REST_S = 2.0  # the GPUs are queried after this rest: queries have a cost
NODES_S = 5.0
STATUS_S = 2.0


def watch(
    command: Sequence[str],
    *,
    folder: str | Path | None = None,
    nodes: str | Path | None = None,
    count: bool = True,
    on_stall: str = "report",
    on_hang: str = "report",
    stall_s: float = 5.0,
    limit_s: float | None = None,
) -> int:
    """Run `command`; return its exit code, or minus the signal that ended it.

    folder: for evidence and reports; by default a new one below watch/. nodes: a folder shared by
    several nodes, each with its own subfolder. count: have its Python processes count their
    progress (whyhung.watch.inside). on_stall, on_hang: "report" or "kill". limit_s: the user's own
    limit, after which the command is ended. Call it in the main thread.

    Raises ValueError for invalid arguments, and OSError if the command cannot be started.
    """
    if not command:
        raise ValueError("no command; write: whyhung watch -- python train.py")
    for option, value in {"on_hang": on_hang, "on_stall": on_stall}.items():
        if value not in ACTIONS:
            raise ValueError(f"{option}={value!r} is none of {', '.join(ACTIONS)}")
    if folder is not None and nodes is not None:
        raise ValueError("a folder and a folder of nodes: give one of them")
    shared = None if nodes is None else Nodes(Path(nodes))
    place = shared.own if shared else Path(folder) if folder else _fresh(command)
    reports = Reports(place)
    evidence = Evidence(spec={"command": shlex.join(command)}, stall_s=stall_s)
    inner = _counters() if count else None
    given = inside.environment(inner, os.environ) if inner else dict(os.environ)
    cookie = family.new_cookie()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    try:
        process = subprocess.Popen(
            list(command),
            env={**given, family.COOKIE: cookie},
            close_fds=False,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
        )
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if inner:
            shutil.rmtree(inner, ignore_errors=True)
        raise
    try:
        kills = {"HANG": on_hang == "kill", "STALLED": on_stall == "kill"}
        watcher = _Watcher(process, cookie, inner, evidence, reports, shared, kills, limit_s)
        thread = threading.Thread(target=watcher.run, name="whyhung watch", daemon=True)
        thread.start()
        _until_it_ends(process, watcher.hears)
        watcher.stop.set()
        thread.join()
        watcher.finish(process.returncode)
    except Exception as error:  # our own failure, which must not become the command's
        reports.say(f"watching has failed, your program goes on: {error!r}")
        _until_it_ends(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if inner and not family.family(cookie):  # else a process still counts there
            shutil.rmtree(inner, ignore_errors=True)
    return process.returncode


def _until_it_ends(process: subprocess.Popen, hears: Callable[[int], Any] = int) -> None:
    """Pass on to the command all signals that are meant for it, until it has ended."""
    with _Bystander() as bystander:
        while process.poll() is None:
            came = signal.sigtimedwait({*PASSED_ON, signal.SIGCHLD}, WAKES_S)
            if came is None or came.si_signo not in PASSED_ON:
                continue
            hears(came.si_signo)
            # The terminal sends its own to us and to the command alike (si_code > 0), and so does
            # whoever sends one to the whole group or job.
            if came.si_code <= 0 and not bystander.got(came.si_signo):
                process.send_signal(came.si_signo)


class _Bystander:
    """Process that no signal is meant for: one that it got, too, was sent to the command as well.

    It sleeps in the same process group, with all those signals blocked. Without it, every signal
    counts as meant for this process alone.
    """

    def __enter__(self) -> _Bystander:
        self._process, null = None, subprocess.DEVNULL
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                ["sleep", "infinity"], stdin=null, stdout=null, stderr=null,
                preexec_fn=family.end_with_thread,
            )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def got(self, number: int) -> bool:
        """Return True once for each time that it got this signal."""
        time.sleep(ARRIVES_S)
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except (AttributeError, OSError):
            return False
        pending = int(status.partition("ShdPnd:")[2].split()[0], 16)
        if not pending >> (number - 1) & 1:
            return False
        self.__exit__()
        self.__enter__()
        return True


def _fresh(command: Sequence[str]) -> Path:
    """Return watch/DATE-NAME-ID, a path that does not exist yet."""
    named = [word for word in command if word.endswith((".py", ".sh"))] or command
    name = "".join(c if c.isalnum() or c in "._" else "-" for c in Path(named[0]).stem)[:40]
    return Path("watch", f"{time.strftime('%Y-%m-%d')}-{name}-{os.urandom(4).hex()}")


def _counters() -> Path:
    """Make the counters' folder, in memory if possible: a slow or full disk must not stop them."""
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="whyhung-", dir=where))


class _Watcher:
    """Thread that observes. Whatever fails in it, the command goes on."""

    def __init__(
        self,
        process: subprocess.Popen,
        cookie: str,
        inner: Path | None,
        evidence: Evidence,
        reports: Reports,
        nodes: Nodes | None,
        kills: Mapping[str, bool],
        limit_s: float | None,
    ) -> None:
        self.process, self.cookie, self.inner = process, cookie, inner
        self.evidence, self.reports, self.nodes = evidence, reports, nodes
        self.kills, self.limit_s, self.stop = kills, limit_s, threading.Event()
        self.members = Members(process.pid, inner, cookie)
        self.observer = Observer(evidence, self.members, cookie=cookie, tell=self.tell)
        self.reason = self.message = ""
        self._heard: tuple[str, float] | None = None  # the signal to end, and when it came
        self._use = contextlib.ExitStack()  # for the GPU queries
        self._asks_gpus, self._next_nodes, self._next_status = False, 0.0, 0.0
        self._has_gpus = shutil.which("nvidia-smi") is not None

    def run(self) -> None:
        with self._use:
            try:
                while not self.stop.wait(WAKES_S) and not self.reason:
                    self.step()
            except Exception as error:
                trace = traceback.format_exc()
                self.reports.say(f"watching has ended, your program goes on: {error!r}")
                self.reports.put("error.txt", trace)

    def step(self) -> None:
        """Take one sample or look, and act on it."""
        observer = self.observer
        if self._ends() and standing(self.evidence):
            return
        self._ask_gpus(observer.rest_s() > GPU_REST_S)
        if not observer.step():
            return
        if self.nodes is not None and observer.t >= self._next_nodes:
            self.nodes.exchange(observer)
            self._next_nodes = observer.t + NODES_S
        if self.stop.is_set():
            return
        verdict = observer.verdict
        if verdict is not None and self.kills.get(verdict.kind):
            self.end("stall", f"{verdict.label}, as you asked for")
        elif observer.t > (self.limit_s or math.inf) and observer.seen_enough():
            self.end("deadline", f"your limit of {self.limit_s:g} s was over")
        if self.reports.draws and observer.t >= self._next_status:
            self.reports.status(self.words())
            self._next_status = observer.t + STATUS_S

    def hears(self, number: int) -> None:
        """Note in the main thread that a signal came, perhaps one that ends the command."""
        if number in ENDING and not self._ends():
            self._heard = family.signal_name(number), self.observer.t

    def _ends(self) -> bool:
        """Return True while an ending signal is so recent that the command still handles it."""
        return self._heard is not None and self.observer.t < self._heard[1] + ENDS_S

    def tell(self, report: dict[str, Any]) -> None:
        """Report that something stands still, or moves again; called by the observer."""
        if report is not self.evidence.reports[-1]:
            return  # another took its place
        if self._ends():  # changes now are the signal's own doing, py-spy's end as well
            if report["withdrawn"] is not None:
                report["withdrawn"] = None
                return
            if len(self.evidence.reports) > 1 and self.evidence.reports[-2]["withdrawn"] is None:
                del self.evidence.reports[-1]
                return
        if report["withdrawn"] is not None:
            since = report["withdrawn"] - report["t"] + (report.get("rested_s") or 0)
            moves = self.observer.rest_s() < since
            what = f"it moves again, after {since:.0f} s" if moves else "somebody works on it again"
            text = f"{what}: {report['label']} is withdrawn"
            self.reports.write(self.now(), judge(self.now()))
            self.reports.say(text)
            return
        verdict = self.observer.verdict
        if self.nodes is not None:
            verdict = self.nodes.spliced(verdict)
        self.reports.tell(self.now(), verdict)

    def now(self) -> Evidence:
        """Return the evidence as of now."""
        return replace(self.evidence, seconds=self.observer.t)

    def words(self) -> str:
        """Return the text of the status line."""
        t, rest_s = self.observer.t, self.observer.rest_s()
        told = [time.strftime("%H:%M:%S", time.gmtime(t))]
        ranks = self.evidence.ranks()
        last = max((self.evidence.last(rank) for rank in ranks), key=lambda p: p.key(), default="")
        told += [f"{len(ranks)} ranks"] * (len(ranks) > 1) + [str(last)]
        verdict = self.observer.verdict
        if rest_s > self.evidence.stall_s:
            told.append(f"rests for {rest_s:.0f} s" + (f": {verdict.label}" if verdict else ""))
        return " · ".join(filter(None, told))

    def end(self, reason: str, message: str) -> None:
        """Write the page, then end the whole family with SIGTERM and SIGKILL, as the user asked."""
        self.reason, self.message = reason, message
        self.reports.write(self.now(), self.observer.judged())
        self.reports.say(f"ends the command: {message}")
        roots = family.family(self.cookie, {self.process.pid})
        for pid in roots:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGCONT)  # a stopped one hears nothing
        limit = time.monotonic() + TERM_S
        while time.monotonic() < limit and family.family(self.cookie):
            time.sleep(WAKES_S)
        family.end_family(self.cookie)

    def finish(self, code: int) -> None:
        """Complete evidence and reports when the command has ended."""
        how = ("returned", "") if code == 0 else ("exit", "")
        if code < 0:
            how = ("signal", family.signal_name(-code))
        message = f"ended by {how[1]}" if code < 0 else f"exit code {code}" * (code > 0)
        if self.reason:
            how, message = ("stopped by the supervisor", self.reason), self.message
        elif name := self._by_user(code):
            message = f"ended by you ({name})"
        self.evidence.end = End(how[0], code, how[1], message)
        self.evidence.seconds = self.observer.t
        cut = cut_short(self.evidence) if self._by_user(code) or not self._moved() else ""
        for report in self.evidence.reports:
            if report["withdrawn"] is None and not self.reason and not cut:
                report["withdrawn"] = self.observer.t
        if self.inner:
            for file in sorted(self.inner.glob("error-*.txt")):
                last = file.read_text(errors="replace").strip().splitlines()[-1:]
                self.evidence.notes += [f"counting from inside: {line}" for line in last]
        with contextlib.suppress(Exception):
            if self.nodes is not None:
                self.nodes.exchange(self.observer, ended=code)
        self.reports.status("")
        (self.reports.tell if cut else self.reports.write)(self.evidence, judge(self.evidence))

    def _moved(self) -> bool:
        """Return True if any rank has advanced since its last sample."""
        read = {rank: layout.cells_of(one.file) for rank, one in self.members().items() if one.file}
        known = {rank: layout.coordinate(cells) for rank, cells in read.items() if cells}
        return any(p != self.evidence.last(rank) for rank, p in known.items())

    def _by_user(self, code: int) -> str:
        """Return the signal by which the user ended it, "" if it ended by itself."""
        if self._ends():
            return self._heard[0]
        number = -code if code < 0 else code - 128
        return family.signal_name(number) if number in (signal.SIGINT, signal.SIGTERM) else ""

    def _ask_gpus(self, rests: bool) -> None:
        if rests == self._asks_gpus or not self._has_gpus:
            return
        self._asks_gpus = rests
        self._use.close()
        use: Callable = devices.device_use
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.observer.use = self._use.enter_context(use(visible)) if rests else None


def as_it_ended(code: int) -> int:
    """Return the exit code for the result of `watch`; a signal ends this process the same way."""
    if code >= 0:
        return code
    sys.stdout.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code
