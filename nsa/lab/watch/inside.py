"""What runs within an unmodified training program, and who of its processes is which rank.

`environment` makes every Python process started below load hook/sitecustomize.py, which calls
`loaded` when torch has been imported. A process then counts its progress at once, unless it is a
child of a process that does: of multiprocessing, or of a rank whose RANK it inherits, or of one
that has made a step. Such a child counts from when it joins a process group, or calls backward
while nobody above has. Each leaves progress-PID.bin, who-PID.json and, when asked, its answers.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nsa.lab.process import child, family, procfs
from nsa.lab.watch import flight_recorder, progress
from nsa.lab.watch.evidence import PHASES
from nsa.lab.watch.progress import Progress

FOLDER = "NSA_WATCH_FOLDER"
ABOVE = "NSA_WATCH_ABOVE"  # those above that count: "PID:RANK:LOCAL_RANK ..."
HOOK = Path(__file__).resolve().with_name("hook")
RECORDER_SIZES = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"  # two names for one thing


def environment(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base`, with which every Python process below is watched from inside, into `folder`.

    What the user has set stays.
    """
    given = [place for place in base.get("PYTHONPATH", "").split(os.pathsep) if place != str(HOOK)]
    paths = os.pathsep.join([str(HOOK), *given] if any(given) else [str(HOOK)])
    ours = dict(flight_recorder.ENVIRONMENT)
    del ours[RECORDER_SIZES[1]]  # newer versions of torch warn of it
    if RECORDER_SIZES[1] in base:
        del ours[RECORDER_SIZES[0]]
    kept = {name: value for name, value in base.items() if name != ABOVE}
    return {**ours, **kept, "PYTHONPATH": paths, FOLDER: str(folder.resolve())}


def begin(folder: Path, key: int | None = None) -> Progress:
    """Counts this process, whose torch is there, from now on: its steps by its first optimizer.

    Leaves progress-KEY.bin and answers in `folder`; the key is the process's number, or a rank.
    """
    counted = Progress(folder / f"progress-{os.getpid() if key is None else key}.bin", lasting=True)
    counted.attach(steps=True)
    return counted


def ranks(folder: Path, lives: Callable[[int], bool] = lambda _: True) -> dict[int, dict[str, Any]]:
    """Of the processes that count in `folder`, those that are ranks: what who-PID.json says.

    A rank is who has RANK in its environment, or has joined a process group; not a launcher above
    such a one. Where there is none, rank 0 is the living process that began its steps first, before
    that the first to end a module's forward, before that the first.
    """
    every = [who for file in folder.glob("who-*.json") if (who := child.read(file))]
    living = [who for who in every if lives(who["pid"])]
    above = {pid for who in every if who["rank"] is not None for pid in who["above"]}
    told = [who for who in every if who["rank"] is not None]
    told = [who for who in told if who["group"] or who["pid"] not in above]
    parents = {who["parent"] for who in told if who in living}
    if parents:  # those of an earlier launch have gone
        told = [who for who in told if who["parent"] in parents]
    if told:
        told.sort(key=lambda who: (who in living, who["group"], who["started"]))
        return {who["rank"]: who for who in told}

    def order(who: dict[str, Any]) -> tuple[Any, ...]:
        cells = progress.cells_of(folder / f"progress-{who['pid']}.bin")
        began = cells[progress.BEGAN_NS] if cells else 0
        return (not began, began, not (cells and cells[progress.MODULES]), who["started"])

    return {0: min(living or every, key=order)} if every else {}


class _This:
    """What this process knows of itself."""

    folder: Path
    above: list[list[str]]  # pid, RANK and LOCAL_RANK of each, the nearest last
    progress: Progress | None = None
    rank: int | None = None
    group = waits = False


def loaded() -> None:
    """torch has been imported in a process of `environment`."""
    from nsa.lab.watch.counting import in_place_of

    family.let_others_look()
    new, old = RECORDER_SIZES
    version = sys.modules["torch"].__version__.split(".")
    if new in os.environ and tuple(map(int, version[:2])) < (2, 9):
        os.environ.setdefault(old, os.environ[new])
    _This.folder = Path(os.environ[FOLDER])
    entries = [entry.split(":") for entry in os.environ.get(ABOVE, "").split()]
    _This.above = [entry for entry in entries if entry[0] != str(os.getpid())]
    place = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK")]
    inherited = bool(place[0] and _This.above and _This.above[-1][1:] == place)
    _This.rank = _number(place[0]) if not inherited else None
    if inherited or _of_multiprocessing() or _above_has_begun():
        _This.rank = None
        _wait()
    else:
        _count()
    for name in ("torch.distributed", "torch.distributed.distributed_c10d"):
        if hasattr(sys.modules.get(name), "init_process_group"):
            in_place_of(sys.modules[name], "init_process_group", _joining)
    os.register_at_fork(after_in_child=_forked)
    atexit.register(_ends)


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _of_multiprocessing() -> bool:
    given = " ".join(sys.orig_argv[1:])
    return any(sign in given for sign in ("--multiprocessing-fork", "multiprocessing.forkserver"))


def _above_has_begun() -> bool:
    files = [_This.folder / f"progress-{pid}.bin" for pid, *_ in _This.above]
    return any(cells[progress.STEP] >= 0 for file in files if (cells := progress.cells_of(file)))


def _count() -> None:
    """This process counts from now on, and says who it is to those outside and below."""
    _This.progress = begin(_This.folder)
    place = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK")]
    chain = [*_This.above, [str(os.getpid()), *place]]
    os.environ[ABOVE] = " ".join(":".join(entry) for entry in chain)
    _say()


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
        "above": [int(entry[0]) for entry in _This.above],
        "argv": sys.orig_argv,
        "cwd": os.getcwd(),
        "executable": sys.executable,
        "python": sys.version.split()[0],
        "torch": sys.modules["torch"].__version__,
    }
    child.put(_This.folder / f"who-{pid}.json", content)


def _wait() -> None:
    """Counts from the first backward, unless somebody above has begun before."""
    from nsa.lab.watch.steps import at_first_backward

    def called() -> None:
        _This.waits = False
        if _This.progress is None and not _above_has_begun():
            _count()

    if not _This.waits:
        _This.waits = True
        at_first_backward(called)


def _forked() -> None:
    """In a forked child, which counts nothing of its parent: `progress` has seen to that."""
    if _This.progress is not None:
        _This.above = [entry.split(":") for entry in os.environ[ABOVE].split()]
    _This.progress, _This.rank, _This.group = None, None, False
    family.let_others_look()
    _wait()


def _ends() -> None:
    if _This.progress is not None:
        _This.progress.cells[progress.PHASE] = PHASES.index("end")


def _joining(plain: Callable[..., Any]) -> Callable[..., Any]:
    """init_process_group, which makes a process a rank."""

    def joining(*args: Any, **options: Any) -> Any:
        if joining.over:
            return plain(*args, **options)
        told = options.get("rank", args[4] if len(args) > 4 else -1)
        rank = told if isinstance(told, int) and told >= 0 else _number(os.environ.get("RANK", ""))
        _This.rank, _This.group = rank, True
        if _This.progress is None:
            _count()
        else:
            _say()
        return plain(*args, **options)

    return joining
