"""How far a training has come, counted in a file that others can read while it is stuck.

The counters live in an mmap, 64 bits each in this machine's order. One process writes, anybody
reads, and whoever reads needs no word from the process, which may hold the GIL, be stopped, or be
dead. A stack says where a process is; only counters say whether it moves.
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

from whyhung.watch.evidence import PHASES, P

CELLS = 24
(
    VERSION, STEP, PHASE, MODULES, FIRED, TOTAL, EVENTS, COLLECTIVES,
    ENTERED, BEATS, ASKED, PID, MAIN_THREAD, _, BEGAN_NS,
) = range(15)  # fmt: skip
LAYOUT = 2


def read(file: str | os.PathLike) -> tuple[P, int]:
    """(P, beats) out of a file that somebody may be writing; P() and 0 where there is none yet."""
    cells = cells_of(file)
    return (P(), 0) if cells is None else (coordinate(cells), cells[BEATS])


def cells_of(file: str | os.PathLike) -> tuple[int, ...] | None:
    """All counters; None where there are none, or of another layout."""
    try:
        content = Path(file).read_bytes()
    except OSError:
        return None
    if len(content) != 8 * CELLS:
        return None
    cells = tuple(memoryview(content).cast("q"))
    return cells if cells[VERSION] == LAYOUT else None


def coordinate(cells: tuple[int, ...]) -> P:
    """The counters as a progress coordinate."""
    return P(cells[STEP], PHASES[cells[PHASE]], *cells[MODULES : ENTERED + 1])


def ask(file: str | os.PathLike) -> None:
    """Asks the process for what only it can tell; answered by its thread, if that gets the GIL."""
    with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 8 * CELLS) as mapped:
        cells = memoryview(mapped).cast("q")
        cells[ASKED] += 1
        cells.release()


# What a thread causes itself stays its own.
_NOT_OURS = signal.valid_signals() - {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT)
}
EVERY_S = 0.5  # between two beats, each of which takes the GIL from the program for a moment
ASIDE_S = 30.0


def in_thread(do: Callable[[], Any]) -> Any:
    """Calls `do` in a thread of ours; returns a lock that is open when it has ended.

    No signal is delivered there, `threading` does not list it, and nobody hears of its errors.
    """
    over = _thread.allocate_lock()
    over.acquire()

    def run() -> None:
        with contextlib.suppress(Exception):
            signal.pthread_sigmask(signal.SIG_SETMASK, _NOT_OURS)
            # To those outside, so that they tell this thread from the program's own.
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
    """Calls `do` in a thread of ours, and waits for it.

    What a handler of a signal raises meanwhile goes to the program, and what `do` raises does not.
    """
    in_thread(do).acquire(timeout=ASIDE_S)


class Progress:
    """Counts what a training does into `file`: steps, phases, modules, autograd nodes, events.

    Give it to a Trainer as an observer; or call `attach`, and it counts whatever this process does,
    every module's forward, every backward, every optimizer step; or feed it by hand. A step begins
    with `step`; where nobody calls `phase`, phases are guessed from what is seen.

    Two beats a second come from a thread that needs the GIL: it tells a process that computes from
    one in which C code keeps it. Where there is a process group or a device, another thread reads
    the group's sequence number and follows the device's events. Neither asks the main thread for
    anything, and no signal reaches them: what a handler of the program's raises is the program's.
    A forward without modules is not counted.

    Cost, of the host's time: 1 us a module, 2 to 3 where only a model is watched, and up to six
    times that with cold caches; 5 us each for about 24 nodes of autograd or, where modules lie far
    apart, 1 us a node and 5 us each for 256 of them; about 1.05 of a step of 22 ms on a CPU (4
    layers, 256 tokens, processor time).
    """

    def __init__(self, file: str | os.PathLike, *, lasting: bool = False) -> None:
        """file: progress-KEY.bin: what it is asked for lies beside it, as flight-KEY.json.

        lasting: `close` does nothing: a trainer must not end what its process counts with.
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
        self.told = False  # somebody names the phases: then none is guessed
        self.outputs: Any = None  # of modules, while backwards are counted
        self.fine = True  # modules and backwards are counted
        self.passed = 0  # modules of the steps before this one
        self.backwards = 0  # under way or over
        # Called with each beat; in how many seconds it wants the next, None: EVERY_S.
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
        """A step begins: its modules and nodes are counted from 0."""
        cells = self.cells
        self.passed += cells[MODULES]
        cells[MODULES] = cells[FIRED] = cells[TOTAL] = 0
        cells[STEP] = number
        cells[BEGAN_NS] = cells[BEGAN_NS] or time.monotonic_ns()
        if self.outputs is not None:
            self.outputs.renew()
        self.guess("other")

    def phase(self, name: str) -> None:
        """One of PHASES begins. From then on none is guessed from modules and backwards.

        Raises ValueError for a name that is not known.
        """
        if name not in PHASES:
            raise ValueError(f"phase={name!r} is none of {', '.join(PHASES)}")
        self.told = True
        self.enter(name)

    def guess(self, name: str) -> None:
        """`enter`, unless somebody names the phases."""
        if not self.told:
            self.enter(name)

    def enter(self, name: str) -> None:
        """`phase`, of which nobody can be sure."""
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
        """Counts the modules of `model` whose forward ends, and all backwards of this process."""
        from whyhung.watch import counting

        if not self._all:
            self._undo += counting.modules_of(model, self)
            self._count_backwards()

    def attach(self, *, steps: bool = False) -> None:
        """Counts every module, backward and optimizer step of this process, whoever makes them.

        steps: nobody tells where one begins: the first optimizer does. Of steps too short for it,
        modules and backwards are then counted now and then: see whyhung.watch.steps.
        """
        # All that its threads need, too: a child must not be forked while one of them imports.
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
        """loss.backward(...), whose nodes are counted, also where nothing is attached."""
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
        """Something was done; on a GPU it counts when the device has come that far."""
        if self._device is None or not self._device.record():
            self.cells[EVENTS] += 1

    def mark(self) -> None:
        """A place on the device's way: an event there, nothing without a device."""
        if self._device is not None:
            self._device.record()

    def collective(self) -> None:
        """A collective was enqueued that the default process group does not count."""
        self.cells[COLLECTIVES] += 1

    def on_start(self, trainer: Any) -> None:
        """As an observer of a Trainer: watches its model."""
        self.watch(trainer.model)

    def on_phase(self, name: str, step: int) -> None:
        if name == "data":
            self.step(step)
        if self._device is not None:  # a capture must not meet our events
            self._device.quiet = name == "graph"
        self.phase(name if name in PHASES else "other")

    def close(self) -> None:
        """Stops the threads and takes all hooks away; the file stays."""
        if self.lasting:
            return
        self._stop.set()
        for over in self._threads:
            if over.acquire(timeout=1.0):
                over.release()
        self.unhook()
        _counting[:] = [other for other in _counting if other is not self]

    def unhook(self) -> None:
        """Takes all hooks away."""
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
        """Apart from the beats: to ask a device or a group may take as long as what they do."""
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
_children_forget: set[int] = set()  # processes whose children do
# Kept for good: to free a CUDA event in a forked child, which has no CUDA, ends that child.
_devices: list[Any] = []


def _forget_in_children() -> None:
    """Keep a forked child, as loaders start them, from counting for its parent.

    All of it is C: a handler's exception would be lost while Python runs there.
    """
    if os.getpid() in _children_forget:
        return
    _children_forget.add(os.getpid())
    nothing = SimpleNamespace(quiet=True, record=bool)
    spare = memoryview(bytearray(8 * CELLS)).cast("q")
    for name, value in (("cells", spare), ("_device", nothing), ("fine", False), ("pace", None)):
        # Each goes through the list once, in a child; those of its children are put here anew.
        setting = map(setattr, iter(_counting), repeat(name), repeat(value))
        os.register_at_fork(after_in_child=partial(deque, setting, 0))


def unhook_parents() -> None:
    """Take away what a forked child that counts for itself has of its parent."""
    for one in _counting:
        if one.pid != os.getpid():
            one.unhook()


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _collectives() -> int:
    """How many collectives the default process group has been given; 0 without one."""
    if not _has_group():
        return 0
    return sys.modules["torch.distributed"].group.WORLD._get_sequence_number_for_group()


def event() -> None:
    """Something was done: progress where this process is watched, nothing where it is not."""
    for counted in tuple(_counting):
        counted.event()


class Unheard:
    """A Progress that tells no step and no phase, for work that is none of the trial's steps."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._progress, name)

    def _nothing(self, *_: Any) -> None: ...

    step = phase = on_phase = on_start = watch = close = _nothing
