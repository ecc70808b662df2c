"""Python lock for which each thread of this process waits, and the thread that holds it.

Read from the frames of all threads and the source of their functions, by a thread of the process
that acquires no lock and runs no code of the program.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from whyhung.process import child
from whyhung.watch import frames
from whyhung.watch.frames import NOTHING, Source

MOST_S = 0.5
LIBRARY = {
    "threading", "queue", "concurrent.futures._base", "multiprocessing.synchronize",
    "multiprocessing.queues", "multiprocessing.pool", "importlib._bootstrap", "_frozen_importlib",
}  # fmt: skip
OURS = "whyhung.watch.progress"
LOCK, RLOCK = type(threading.Lock()), type(threading.RLock())
_OWNER = re.compile(r"owner=(\d+)")
Stack = list[FrameType]


def write(folder: Path, key: int | str) -> None:
    """Write locks-KEY.json, {"waits", "stacks", "errors", "seconds"}, to `folder`."""
    began = time.monotonic()
    reading = _Reading()
    content = {"waits": reading.waits(), "stacks": reading.stacks(), "errors": reading.errors}
    with contextlib.suppress(OSError, TypeError, ValueError):
        child.put(folder / f"locks-{key}.json", content | {"seconds": time.monotonic() - began})


def waits() -> list[dict[str, Any]]:
    """One row per thread that waits for a Python object, computed within half a second.

    tid and thread, its name; line, "file:line function" that waits; what, the kind of the awaited
    object, and name, the expression for it in the source; timed, True if the wait has a timeout;
    holders, tids of threads that hold it, or that alone can end the wait, and held_at, the lines
    of the holders; by, how they were found, and sure, True if that is certain. Empty holders: none
    was found, which does not mean that there is none.
    """
    return _Reading().waits()


class _Reading:
    """One observation of all threads."""

    def __init__(self) -> None:
        self._end = time.monotonic() + MOST_S
        self._threads = dict(threading._active)  # type: ignore[attr-defined]
        self._stacks: dict[int, Stack] = {}
        self._sources: dict[CodeType, Source] = {}
        self._held: list[_Held] | None = None
        self.errors: list[str] = []
        for ident, frame in sys._current_frames().items():
            stack: Stack = []
            inner: FrameType | None = frame
            while inner is not None:
                stack.append(inner)
                inner = inner.f_back
            self._stacks[ident] = stack
        self._at = {ident: stack[0].f_lasti for ident, stack in self._stacks.items()}

    def waits(self) -> list[dict[str, Any]]:
        found = []
        for ident, stack in self._stacks.items():
            ours = any(_module(frame) == OURS for frame in stack)
            if ours or time.monotonic() > self._end:
                continue
            with self._noting():
                wait = self._wait(stack)
                lock = wait and wait["object"]
                free = type(lock) is LOCK and not lock.locked()
                if wait is not None and not free:
                    found.append((ident, wait))
        for _, wait in found:
            self._find_holders(wait)
        now = sys._current_frames()
        still = [(ident, wait) for ident, wait in found if self._stands(ident, now.get(ident))]
        return [self._told(ident, wait) for ident, wait in still]

    def stacks(self) -> dict[int, list[str]]:
        """{tid: frames, innermost first}, as they were when this observation began."""
        return {
            self._tid(ident): [_line(frame) for frame in stack]
            for ident, stack in self._stacks.items()
        }

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Record an error and go on with other threads if one cannot be read."""
        try:
            yield
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def _stands(self, ident: int, frame: FrameType | None) -> bool:
        """True if the thread is where it was when this observation began."""
        return frame is self._stacks[ident][0] and frame.f_lasti == self._at[ident]

    def _told(self, ident: int, wait: dict[str, Any]) -> dict[str, Any]:
        holders = [one for one in wait.pop("held_by") if one != 0]
        wait.pop("object")
        at = [_line(_user(self._stacks[one])) if one in self._stacks else "" for one in holders]
        named = {"tid": self._tid(ident), "thread": self._name(ident)}
        tids = [self._tid(one) for one in holders]
        return named | wait | {"holders": tids, "held_at": wait.pop("held_at", None) or at}

    def _tid(self, ident: int) -> int:
        """Kernel thread id; 0 for a thread that Python did not start."""
        if ident == threading.main_thread().ident:
            return os.getpid()
        return _held(self._threads.get(ident), "_native_id") or 0

    def _name(self, ident: int) -> str:
        return _held(self._threads.get(ident), "_name") or ""

    def _source(self, frame: FrameType) -> Source:
        code = frame.f_code
        if code not in self._sources:
            self._sources[code] = Source()
            with contextlib.suppress(Exception):  # no file, another one by now, no Python
                self._sources[code] = frames.source_of(code)
        return self._sources[code]

    # waits

    def _wait(self, stack: Stack) -> dict[str, Any] | None:
        """Wait of a thread; None if it waits for no object of a known kind."""
        if _module(stack[0]) not in LIBRARY:
            return self._of_program(stack)
        library = []
        for frame in stack:
            if _module(frame) not in LIBRARY:
                break
            library.append(frame)
        user = stack[len(library)] if len(library) < len(stack) else library[-1]
        name = self._expression(user) if user is not library[-1] else ""
        timeouts = [frame.f_locals.get("timeout") for frame in library]
        timed = any(type(t) in (int, float) and t >= 0 for t in timeouts)
        wait = {"line": _line(user), "name": name, "timed": timed}
        return self._of_library(library, wait)

    def _of_library(self, library: Stack, wait: dict[str, Any]) -> dict[str, Any] | None:
        inner, outer = library[0], library[-1]
        function, mine = inner.f_code.co_name, inner.f_locals.get("self")
        owner = outer.f_locals.get("self")
        kind = "" if owner is None else type(owner).__name__
        wait |= {"what": kind, "object": None, "held_by": [], "by": "", "sure": True}
        if _module(inner) in ("importlib._bootstrap", "_frozen_importlib"):
            owner = _held(mine, "owner")
            if function != "acquire" or owner is None:
                return None
            what = {"what": "the import of", "name": _held(mine, "name"), "held_by": [owner]}
            return wait | what | {"by": "the owner of the module's lock"}
        if function == "_shutdown":
            alive = [i for i, t in self._threads.items() if not _held(t, "_daemonic")]
            alive = [i for i in alive if i != threading.main_thread().ident]
            what = {"what": "the end of", "name": "threads that are not daemons", "held_at": [""]}
            return wait | what | {"held_by": alive, "by": "threading joins them at the end"}
        if function in ("join", "_wait_for_tstate_lock"):
            ident = _held(mine, "_ident")
            name = wait["name"] or _held(mine, "_name")
            what = {"what": "the end of", "name": name, "held_by": [ident or 0], "held_at": [""]}
            return wait | what | {"by": "join() waits for that thread's end"}
        asks = self._line_text(inner)
        if function in ("__enter__", "_acquire_restore") or "_acquire_restore" in asks:
            core = _core(mine)
            return None if core is None else wait | {"object": core, "by": "the lock of it"}
        if function == "acquire" and _module(inner) == "threading" and _owner(mine):
            return wait | {"what": "RLock", "object": mine}  # one written in Python
        if function != "wait":
            return None
        if _future_type() in type(outer.f_locals.get("self")).__mro__:
            future = outer.f_locals["self"]
            at = [i for i, stack in self._stacks.items() if _works_for(stack, future)]
            wait |= {"held_by": at, "by": "the thread that computes it" if at else ""}
            wait["held_at"] = [""]
        return wait

    def _of_program(self, stack: Stack) -> dict[str, Any] | None:
        """Wait for a lock written in C, where the program's own frame is the innermost."""
        frame, source, at = stack[0], self._source(stack[0]), frames.place(stack[0])
        wait = {"line": _line(frame), "timed": False, "held_by": [], "by": "", "sure": True}
        if (entered := frames.entering(source, at)) is not None:
            node, item = entered
            expression = node.items[item].context_expr
        else:
            call = frames.calling(source, at)
            if call is None or _method(call) not in ("acquire", "get"):
                return None
            expression = call.func.value  # type: ignore[attr-defined]
            wait["timed"] = len(call.args) > 1 or any(k.arg != "blocking" for k in call.keywords)
        held = frames.value(expression, frame)
        wait |= {"name": ast.unparse(expression), "object": held, "what": type(held).__name__}
        if type(held).__name__ == "SimpleQueue":
            return wait | {"what": "Queue", "object": None}
        if (core := _core(held)) is not None:
            kinds = {LOCK: "Lock", RLOCK: "RLock"}
            return wait | {"what": kinds.get(type(held), type(held).__name__), "object": core}
        if entered is None and _method(call) == "acquire" and held is NOTHING:
            what = {"what": "Lock", "object": None, "sure": False}
            return wait | what | {"by": "its object cannot be named without running the program"}
        return None

    def _expression(self, frame: FrameType) -> str:
        """Expression whose method the frame calls, or which it enters; "" if neither."""
        source, at = self._source(frame), frames.place(frame)
        if (entered := frames.entering(source, at)) is not None:
            return ast.unparse(entered[0].items[entered[1]].context_expr)
        call = frames.calling(source, at)
        return "" if call is None else ast.unparse(call.func.value)  # type: ignore[attr-defined]

    def _line_text(self, frame: FrameType) -> str:
        with contextlib.suppress(OSError, IndexError):
            return frames.lines_of(frame.f_code.co_filename)[frame.f_lineno - 1]
        return ""

    # holders

    def _find_holders(self, wait: dict[str, Any]) -> None:
        core = wait["object"]
        if core is None:
            return
        if (owner := _owner(core)) is not None:
            wait |= {"held_by": [owner], "by": "the owner that the RLock names"}
            return
        found = [held for held in self._all_held() if held.core is core]
        found = [held for held in found if held.sure] or found
        if found:
            wait["held_by"] = [held.ident for held in found]
            wait["held_at"] = [_line(held.frame) for held in found]
            wait |= {"by": found[0].how, "sure": found[0].sure}

    def _all_held(self) -> list[_Held]:
        """Locks that the frames of all threads visibly hold."""
        if self._held is None:
            self._held = []
            for ident, stack in self._stacks.items():
                for depth, frame in enumerate(stack):
                    if time.monotonic() > self._end:
                        self.errors.append(f"not all frames could be read within {MOST_S:g} s")
                        return self._held
                    with self._noting():
                        lets_go = [core for inner in stack[:depth] if (core := _waited_on(inner))]
                        for core, how, sure in self._holds(frame):
                            if not any(core is one for one in lets_go):
                                self._held.append(_Held(core, ident, frame, how, sure))
        return self._held

    def _holds(self, frame: FrameType) -> Iterator[tuple[Any, str, bool]]:
        """(lock, how it was found, True if certain) for each lock that this frame holds."""
        source = self._source(frame)
        calls = [c for c in source.calls if _method(c) in ("acquire", "release")]
        if not source.withs and not calls:
            return
        at = frames.place(frame)
        entered = frames.entering(source, at)
        for node in source.withs:
            items = node.items if frames.within(node, at) else []
            if entered is not None and entered[0] is node:
                items = node.items[: entered[1]]
            for item in items:
                if (core := _core(frames.value(item.context_expr, frame))) is not None:
                    name = ast.unparse(item.context_expr)
                    yield core, f"inside `with {name}` of the same lock", True
        last: dict[int, tuple[Any, ast.Call]] = {}
        for call in sorted(calls, key=lambda c: (c.lineno, c.col_offset)):
            core = _core(frames.value(call.func.value, frame))  # type: ignore[attr-defined]
            ends = (call.end_lineno or 0, call.end_col_offset or 0)
            if core is not None and ends <= (at.start or (at.line, 0)):
                last[id(core)] = (core, call)
        for core, call in last.values():
            if _method(call) == "acquire":
                how = f"acquire() in line {call.lineno}, and no release() before line {at.line}"
                yield core, how, False


@dataclass(frozen=True)
class _Held:
    core: Any  # what is locked
    ident: int
    frame: FrameType
    how: str
    sure: bool


def _method(call: ast.Call) -> str:
    return call.func.attr  # type: ignore[attr-defined]


def _module(frame: FrameType) -> str:
    name = dict.get(frame.f_globals, "__name__")
    return name if type(name) is str else ""


def _user(stack: Stack) -> FrameType:
    return next((frame for frame in stack if _module(frame) not in LIBRARY), stack[-1])


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"


def _held(held: Any, name: str) -> Any:
    """Attribute of an object of the standard library; None if it has none."""
    found = frames.attribute(held, name)
    return None if found is NOTHING else found


def _core(held: Any) -> Any:
    """Underlying lock of `held`: a condition's lock, a multiprocessing semaphore; or None."""
    if type(held) in (LOCK, RLOCK):
        return held
    module = type(held).__module__
    if module == "threading" and type(held).__name__ in ("Condition", "_RLock"):
        return held if type(held).__name__ == "_RLock" else _core(_held(held, "_lock"))
    if module == "multiprocessing.synchronize":
        return _held(held, "_semlock") or _core(_held(held, "_lock"))
    return None


def _owner(lock: Any) -> int | None:
    """Ident of the thread that owns an RLock; None if it is free or another kind of lock."""
    if type(lock) is RLOCK:
        found = _OWNER.search(RLOCK.__repr__(lock))
        return int(found[1]) or None if found else None
    if type(lock).__module__ == "threading" and type(lock).__name__ == "_RLock":
        return _held(lock, "_owner")
    return None


def _waited_on(frame: FrameType) -> Any:
    """Lock that a condition's wait() in this frame has released; None if there is none."""
    if _module(frame) != "threading" or frame.f_code.co_name != "wait":
        return None
    return _core(frame.f_locals.get("self"))


def _works_for(stack: Stack, future: Any) -> bool:
    items = (frame for frame in stack if _module(frame) == "concurrent.futures.thread")
    return any(_held(frame.f_locals.get("self"), "future") is future for frame in items)


def _future_type() -> Any:
    return getattr(sys.modules.get("concurrent.futures._base"), "Future", None)
