"""Code that runs within an unmodified training program, and finds which process is which rank.

`environment` makes every Python process started below load hook/sitecustomize.py, which calls
`loaded` when torch has been imported. A process then counts its progress at once, unless it is a
multiprocessing child, or a descendant of a counting process whose RANK it inherits or that has
begun its steps. Such a child counts once it joins a process group, or calls backward while no
ancestor has. Each writes progress-PID.bin, who-PID.json and, on request, its answers.

The main thread belongs to the program, and so does any exception that a signal handler raises
there. Code that could fail runs in a thread of ours for which it waits (`progress.aside`); code
that runs at a fork or an exit, where Python would lose such an exception, is C.
"""

from __future__ import annotations

import atexit
import operator
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from whyhung.process import child, family, procfs
from whyhung.watch import flight_recorder, layout, progress
from whyhung.watch.evidence import PHASES
from whyhung.watch.progress import Progress

FOLDER = "NSA_WATCH_FOLDER"
ABOVE = "NSA_WATCH_ABOVE"  # ancestors that count: "PID:RANK:LOCAL_RANK ..."
HOOK = Path(__file__).resolve().with_name("hook")
RECORDER_SIZES = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"  # two names for one thing


def environment(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Extend `base` so that every Python process below is watched from inside, into `folder`.

    Variables that the user has set are kept.
    """
    given = [place for place in base.get("PYTHONPATH", "").split(os.pathsep) if place != str(HOOK)]
    paths = os.pathsep.join([str(HOOK), *given] if any(given) else [str(HOOK)])
    ours = dict(flight_recorder.ENVIRONMENT)
    del ours[RECORDER_SIZES[1]]  # newer versions of torch warn about it
    if RECORDER_SIZES[1] in base:
        del ours[RECORDER_SIZES[0]]
    kept = {name: value for name, value in base.items() if name != ABOVE}
    return {**ours, **kept, "PYTHONPATH": paths, FOLDER: str(folder.resolve())}


def ranks(folder: Path, lives: Callable[[int], bool] = lambda _: True) -> dict[int, dict[str, Any]]:
    """{rank: contents of its who-PID.json} for the processes that count in `folder`.

    A rank is a process that has RANK in its environment, or has joined a process group, but not a
    launcher above one. Without any, rank 0 is the living process that began its steps first; if
    none has, the first started of those that ended a module's forward, else the first started.
    """
    every = [who for file in folder.glob("who-*.json") if (who := child.read(file))]
    living = [who for who in every if lives(who["pid"])]
    above = {pid for who in every if who["rank"] is not None for pid in who["above"]}
    told = [who for who in every if who["rank"] is not None]
    told = [who for who in told if who["group"] or who["pid"] not in above]
    parents = {who["parent"] for who in told if who in living}
    if parents:  # ranks of an earlier launch have ended
        told = [who for who in told if who["parent"] in parents]
    if told:
        told.sort(key=lambda who: (who in living, who["group"], who["started"]))
        return {who["rank"]: who for who in told}

    def order(who: dict[str, Any]) -> tuple[Any, ...]:
        cells = layout.cells_of(folder / f"progress-{who['pid']}.bin")
        began = cells[layout.BEGAN_NS] if cells else 0
        return (not began, began, not (cells and cells[layout.MODULES]), who["started"])

    return {0: min(living or every, key=order)} if every else {}


class _This:
    """State of this process."""

    folder: Path
    progress: Progress | None = None
    rank: int | None = None
    group = waits = False  # waits: for a first backward


def loaded() -> None:
    """Start watching: torch is imported in a process of `environment`. Called in our thread."""
    from whyhung.watch.counting import in_place_of

    family.let_others_look(children=True)
    new, old = RECORDER_SIZES
    version = sys.modules["torch"].__version__.split(".")
    if new in os.environ and tuple(map(int, version[:2])) < (2, 9):
        os.environ.setdefault(old, os.environ[new])
    _This.folder = Path(os.environ[FOLDER])
    place = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK")]
    inherited = bool(place[0] and (above := _above()) and above[-1][1:] == place)
    if inherited or _of_multiprocessing() or _above_has_begun():
        _This.waits = True
    else:
        _This.rank = _number(place[0])
        _count()
    in_place_of(sys.modules["torch.autograd"], "backward", _first)
    for name in ("torch.distributed", "torch.distributed.distributed_c10d"):
        if hasattr(sys.modules.get(name), "init_process_group"):
            in_place_of(sys.modules[name], "init_process_group", _joining)
    # A forked child counts nothing for its parent: `progress` ensures that.
    for name, value in {"progress": None, "rank": None, "group": False, "waits": True}.items():
        os.register_at_fork(after_in_child=partial(setattr, _This, name, value))


def _above() -> list[list[str]]:
    """[pid, RANK, LOCAL_RANK] of each ancestor that counts, the nearest last."""
    entries = [entry.split(":") for entry in os.environ.get(ABOVE, "").split()]
    return [entry for entry in entries if entry[0] != str(os.getpid())]


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _of_multiprocessing() -> bool:
    given = " ".join(sys.orig_argv[1:])
    return any(sign in given for sign in ("--multiprocessing-fork", "multiprocessing.forkserver"))


def _above_has_begun() -> bool:
    files = [_This.folder / f"progress-{pid}.bin" for pid, *_ in _above()]
    return any(cells[layout.STEP] >= 0 for file in files if (cells := layout.cells_of(file)))


def _count() -> None:
    """Begin to count in this process, and publish its identity to observers and descendants."""
    progress.unhook_parents()
    _This.progress = Progress(_This.folder / f"progress-{os.getpid()}.bin", lasting=True)
    _This.progress.attach(steps=True)  # begun by its first optimizer
    _This.waits = False
    place = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK")]
    chain = [*_above(), [str(os.getpid()), *place]]
    os.environ[ABOVE] = " ".join(":".join(entry) for entry in chain)
    _say()
    ending = repeat(layout.PHASE), repeat(PHASES.index("end"))
    atexit.register(next, map(operator.setitem, _This.progress.its_cells, *ending), None)


def _say() -> None:
    pid, seen = os.getpid(), procfs.process(os.getpid())
    names = "LOCAL_RANK", "WORLD_SIZE"
    numbers = {name.lower(): _number(os.environ.get(name, "")) for name in names}
    content = {
        "pid": pid,
        "parent": os.getppid(),
        "started": seen.started if seen else 0,
        "rank": _This.rank,
        **numbers,
        "group": _This.group,
        "above": [int(entry[0]) for entry in _above()],
        "argv": sys.orig_argv,
        "cwd": os.getcwd(),
        "executable": sys.executable,
        "python": sys.version.split()[0],
        "torch": sys.modules["torch"].__version__,
    }
    child.put(_This.folder / f"who-{pid}.json", content)


def _first(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap backward: its first call makes a process count, unless an ancestor has begun steps."""
    from whyhung.watch.counting import is_compiling, raise_on

    def late() -> None:
        if not _above_has_begun():
            _count()

    def first(*args: Any, **options: Any) -> Any:
        if is_compiling():
            return plain(*args, **options)
        try:
            if _This.waits:
                _This.waits = False
                progress.aside(late)
            return plain(*args, **options)
        except BaseException as error:
            raise_on(error)
            raise

    return first


def _joining(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap init_process_group, which makes a process a rank."""
    from whyhung.watch.counting import raise_on

    def joining(*args: Any, **options: Any) -> Any:
        try:
            told = options.get("rank", args[4] if len(args) > 4 else -1)
            known = isinstance(told, int) and told >= 0
            _This.rank = told if known else _number(os.environ.get("RANK", ""))
            _This.group = True
            progress.aside(_count if _This.progress is None else _say)
            return plain(*args, **options)
        except BaseException as error:
            raise_on(error)
            raise

    return joining
