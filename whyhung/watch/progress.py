"""Progress counters of a training, in a file that other processes can read while it is stuck.

The counters are in an mmap, 64 bits each in this machine's byte order. One process writes, any may
read, and reading needs no cooperation from the process, which may hold the GIL, be stopped, or be
dead. A stack shows where a process is; only counters show whether it moves.
"""

from __future__ import annotations

import _thread
import contextlib
import mmap
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from whyhung.watch.evidence import PHASES
from whyhung.watch.layout import (
    ASKED,
    BEATS,
    BEGAN_NS,
    CELLS,
    COLLECTIVES,
    ENTERED,
    EVENTS,
    FIRED,
    LAYOUT,
    MAIN_THREAD,
    MODULES,
    PHASE,
    PID,
    STEP,
    TOTAL,
    VERSION,
)

# Signals that a thread causes itself stay its own.
_NOT_OURS = signal.valid_signals() - {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT)
}
EVERY_S = 0.5  # between two beats, each of which takes the GIL from the program for a moment
ASIDE_S = 30.0


def in_thread(do: Callable[[], Any]) -> Any:
    """Call `do` in a thread of ours; return a lock that is released when it has ended.

    No signal is delivered there, `threading` does not list it, and its errors are dropped.
    """
    over = _thread.allocate_lock()
    over.acquire()

    def run() -> None:
        with contextlib.suppress(Exception):
            signal.pthread_sigmask(signal.SIG_SETMASK, _NOT_OURS)
            # Lets outside observers distinguish this thread from the program's own.
            Path("/proc/thread-self/comm").write_text("nsa:progress")
        with contextlib.suppress(Exception):
            do()
        over.release()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError as error:  # no more threads here
        if error.__traceback__.tb_next is not None:
            raise  # of a signal's handler, which is the program's
        over.release()
    return over


def aside(do: Callable[[], Any]) -> None:
    """Call `do` in a thread of ours, and wait for it.

    Exceptions of signal handlers meanwhile reach the program, those of `do` do not.
    """
    in_thread(do).acquire(timeout=ASIDE_S)


class Progress:
    """Count a training's progress into `file`: steps, phases, modules, autograd nodes, events.

    Pass it to a Trainer as an observer; or call `attach` to count all work of this process: every
    module's forward, every backward, every optimizer step; or call its methods by hand. A step
    begins with `step`; if `phase` is never called, phases are guessed from the observed calls.

    Two beats a second come from a thread that needs the GIL, which distinguishes a process that
    computes from one in which C code keeps the GIL. With a process group or a device, another
    thread reads the group's sequence number and follows the device's events. Neither needs the main
    thread, and no signal reaches them: exceptions of the program's handlers stay in the program.
    A forward without modules is not counted.

    Cost in host time: 1 us per module, 2 to 3 if only a model is watched, and up to six times that
    with cold caches; 5 us each for about 24 autograd nodes or, if modules are far apart, 1 us per
    node and 5 us each for 256 of them; about 1.05 times a step of 22 ms on a CPU (4 layers, 256
    tokens, processor time).
    """

    def __init__(self, file: str | os.PathLike, *, lasting: bool = False) -> None:
        """file: progress-KEY.bin; requested data is written next to it, such as flight-KEY.json.

        lasting: `close` does nothing, so a trainer cannot end the counting of its whole process.
        """
        self.file, self.lasting = Path(file), lasting
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "w+b") as opened:
            opened.truncate(8 * CELLS)
            self._mapped = mmap.mmap(opened.fileno(), 8 * CELLS)
        self.cells = memoryview(self._mapped).cast("q")
        self.cells[STEP] = -1
        self.cells[PID] = self.pid = os.getpid()
        self.cells[MAIN_THREAD] = threading.main_thread().ident or 0
        self.cells[VERSION] = LAYOUT
        self.told = False  # phases are set explicitly: then none is guessed
        self.outputs: Any = None  # of modules, while backwards are counted
        self.fine = True  # modules and backwards are counted
        self.passed = 0  # modules of the steps before this one
        self.backwards = 0  # under way or over
        # Called with each beat; returns the seconds until the next one, None: EVERY_S.
        self.pace: Callable[[], float | None] | None = None
        self.firing: list[Any] = []  # of those under way: see whyhung.watch.counting
        self._undo: list[Callable[[], Any]] = []
        self._all = self._counts_backwards = False
        self._device: Any = None
        self.its_cells = map(getattr, repeat(self), repeat("cells"))
        _counting.append(self)
        _forget_in_children()
        self._stop = threading.Event()
        self._threads = [in_thread(self._beat)]

    def step(self, number: int) -> None:
        """Begin a step: its modules and nodes are counted from 0."""
        cells = self.cells
        self.passed += cells[MODULES]
        cells[MODULES] = cells[FIRED] = cells[TOTAL] = 0
        cells[STEP] = number
        cells[BEGAN_NS] = cells[BEGAN_NS] or time.monotonic_ns()
        if self.outputs is not None:
            self.outputs.renew()
        self.guess("other")

    def phase(self, name: str) -> None:
        """Begin one of PHASES. After this call, none is guessed from modules and backwards.

        Raises ValueError for an unknown name.
        """
        if name not in PHASES:
            raise ValueError(f"phase={name!r} is none of {', '.join(PHASES)}")
        self.told = True
        self.enter(name)

    def guess(self, name: str) -> None:
        """Call `enter`, unless phases are set explicitly."""
        if not self.told:
            self.enter(name)

    def enter(self, name: str) -> None:
        """Begin a phase that may be a guess: unlike `phase`, this leaves guessing on."""
        cells = self.cells
        cells[PHASE] = PHASES.index(name)
        cells[ENTERED] += 1
        torch = sys.modules.get("torch")
        if self._device is None and torch is not None and torch.cuda.is_initialized():
            from whyhung.watch.counting import DeviceEvents

            self._device = DeviceEvents()
            _devices.append(self._device)
        self.mark()

    def watch(self, model: Any) -> None:
        """Count the modules of `model` whose forward ends, and all backwards of this process."""
        from whyhung.watch import counting

        if not self._all:
            self._undo += counting.modules_of(model, self)
            self._count_backwards()

    def attach(self, *, steps: bool = False) -> None:
        """Count every module, backward and optimizer step of this process.

        steps: take the beginnings of steps from the first optimizer. If steps are too short for
        it, modules and backwards are then counted only at intervals: see whyhung.watch.steps.
        """
        # Imports for its threads, too: a child must not be forked while one of them imports.
        from whyhung.watch import counting, flight_recorder, locks  # noqa: F401

        if self._all:
            return
        self._all = True
        self._undo += [*counting.all_modules(self), *counting.optimizers(self)]
        self._count_backwards()
        if steps:
            from whyhung.watch.steps import Pace, of_optimizers, waits_for_data

            self._undo += [*of_optimizers(self), *waits_for_data(self)]
            self.pace = Pace(self)

    def _count_backwards(self) -> None:
        from whyhung.watch import counting

        self.outputs = counting.Outputs(self)
        if not self._counts_backwards:
            self._counts_backwards = True
            self._undo += counting.backwards(self)

    def backward(self, loss: Any, *args: Any, **options: Any) -> None:
        """Call loss.backward(...) and count its nodes, even if nothing is attached."""
        from whyhung.watch import counting

        if self._counts_backwards:
            loss.backward(*args, **options)
            return
        counts = counting.Backward(self)
        try:
            counts.begin([loss])
            loss.backward(*args, **options)
            counts.done()
        finally:
            counts.end()

    def event(self) -> None:
        """Count an event; on a GPU it counts when the device has reached it."""
        if self._device is None or not self._device.record():
            self.cells[EVENTS] += 1

    def mark(self) -> None:
        """Record a device event here; do nothing without a device."""
        if self._device is not None:
            self._device.record()

    def on_start(self, trainer: Any) -> None:
        """Watch the model of a Trainer whose observer this is."""
        self.watch(trainer.model)

    def on_phase(self, name: str, step: int) -> None:
        if name == "data":
            self.step(step)
        if self._device is not None:  # a capture must not record our events
            self._device.quiet = name == "graph"
        self.phase(name if name in PHASES else "other")

    def close(self) -> None:
        """Stop the threads and remove all hooks; the file stays."""
        if self.lasting:
            return
        self._stop.set()
        for over in self._threads:
            if over.acquire(timeout=1.0):
                over.release()
        self.unhook()
        _counting[:] = [other for other in _counting if other is not self]

    def unhook(self) -> None:
        """Remove all hooks."""
        self.pace = None
        for undo in reversed(self._undo):
            undo()
        self._undo, self._all, self._counts_backwards, self.outputs = [], False, False, None

    def _beat(self) -> None:
        answered, wait_s = 0, EVERY_S
        while not self._stop.wait(wait_s):
            self.cells[BEATS] += 1
            with contextlib.suppress(Exception):
                pace = self.pace
                wait_s = (pace() if pace is not None else None) or EVERY_S
                if len(self._threads) == 1 and (self._device is not None or _has_group()):
                    self._threads.append(in_thread(self._poll))
                if self.cells[ASKED] > answered:
                    answered = self.cells[ASKED]
                    in_thread(self._answer)  # for which the beats do not wait

    def _poll(self) -> None:
        """Poll device and group, apart from the beats: a query may block as long as their work."""
        enqueued = 0
        while not self._stop.wait(EVERY_S):
            with contextlib.suppress(Exception):
                if self._device is not None:
                    self.cells[EVENTS] += self._device.passed()
                now = _collectives()
                self.cells[COLLECTIVES] += max(0, now - enqueued)
                enqueued = now

    def _answer(self) -> None:
        from whyhung.watch import flight_recorder, locks

        key = self.file.stem.partition("-")[2]
        locks.write(self.file.parent, key)
        flight_recorder.write(self.file.parent, key)


_counting: list[Progress] = []
_children_forget: set[int] = set()  # pids with fork hooks, see _forget_in_children
# Kept forever: freeing a CUDA event in a forked child, which has no CUDA, ends that child.
_devices: list[Any] = []


def _forget_in_children() -> None:
    """Prevent forked children, such as loader workers, from counting for their parent.

    The hooks run entirely in C: a signal handler's exception would be lost in Python code there.
    """
    if os.getpid() in _children_forget:
        return
    _children_forget.add(os.getpid())
    nothing = SimpleNamespace(quiet=True, record=bool)
    spare = memoryview(bytearray(8 * CELLS)).cast("q")
    for name, value in (("cells", spare), ("_device", nothing), ("fine", False), ("pace", None)):
        # Each iterates over the list once, in a child, which registers new ones for its children.
        setting = map(setattr, iter(_counting), repeat(name), repeat(value))
        os.register_at_fork(after_in_child=partial(deque, setting, 0))


def unhook_parents() -> None:
    """Remove the parent's hooks in a forked child that counts for itself."""
    for one in _counting:
        if one.pid != os.getpid():
            one.unhook()


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _collectives() -> int:
    """Number of collectives enqueued in the default process group; 0 without one."""
    if not _has_group():
        return 0
    return sys.modules["torch.distributed"].group.WORLD._get_sequence_number_for_group()


def event() -> None:
    """Count an event if this process is watched; else do nothing."""
    for counted in tuple(_counting):
        counted.event()


class Unheard:
    """Progress that ignores steps and phases, for work outside the trial's steps."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._progress, name)

    def _nothing(self, *_: Any) -> None: ...

    step = phase = on_phase = on_start = watch = close = _nothing
