"""Digest of the thread state that py-spy shows, with a mark if other state could change.

py-spy shows locals: numbers, and the beginnings of strings, lists, dicts and tuples. It shows no
attribute, tensor element, global, closure, iterator or clock. So equal digests alone prove
nothing: `while time.time() < end: pass` has them too.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import time
from functools import lru_cache
from itertools import islice
from typing import Any

from whyhung.verdict.frames import is_users
from whyhung.verdict.picture import seconds
from whyhung.watch.evidence import HIDDEN
from whyhung.watch.frames import parsed

# Node types allowed in a loop that depends on no state outside its names.
_PLAIN = (
    ast.While, ast.If, ast.Pass, ast.Continue, ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign,
    ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple,
    ast.expr_context, ast.Add, ast.Sub, ast.Mult, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
_READ_S = 0.05  # an interpreter reads its script no sooner after its start
_NUMBER = re.compile(r"-?[\d.]+(e[-+]?\d+)?$")
# Calls allowed in a loop that only polls and sleeps.
_SAYS = {"sleep", "print", "time", "monotonic", "perf_counter", "debug", "info", "warning", "error",
         "write", "flush", "format", "round", "int", "TimeoutError", "RuntimeError"}  # fmt: skip
_NEAR = 6  # innermost frames in which the polled object is searched


def digest(frames: list[dict[str, Any]], pid: int, began: float) -> str:
    """Hash of the locals of the user's frames, innermost first; "" if there is no frame.

    Frames of libraries are excluded: the deadline of a queue's poll changes without progress.
    If there is no user frame, all frames are included.

    Without HIDDEN at its end, the thread is in a loop that it cannot leave by itself, whatever its
    callers do: the loop calls nothing, has no exit, and its test is always true, as a constant or,
    if it sets no name, by plain locals. Names that it sets are excluded, and so are names set by
    loops that only poll, sleep and log. began: start of the process, in seconds since the epoch.
    """
    if not frames:
        return ""
    passing = endless(frames[0], pid, began)
    shown = hashlib.sha256()
    counters = {depth: waiting(frame, pid, began) for depth, frame in enumerate(frames[:_NEAR])}
    own = [is_users(_place(frame)) for frame in frames]
    for depth, frame in enumerate(frames):
        if not own[depth] and any(own) and (depth or passing is None):
            continue
        shown.update(f"{frame['filename']}\0{frame['name']}\0".encode(errors="replace"))
        for local in frame.get("locals") or ():
            if local["name"] in counters.get(depth, ()):
                continue
            if depth or not passing or local["name"] not in passing:
                told = f"{local['name']}\0{local['addr']}\0{local['repr']}\0"
                shown.update(told.encode(errors="replace"))
    return shown.hexdigest()[:16] + (HIDDEN if passing is None else "")


def polled(frames: list[dict[str, Any]], pid: int) -> str:
    """Path among the locals of the innermost frames, with its age; else the user's source line.

    This is what a thread polls that sleeps between two queries. "" if neither is known.
    """
    for frame in frames[:_NEAR]:
        for local in frame.get("locals") or ():
            text = str(local["repr"])
            if text[:1] in "'\"" and "/" in text and not re.search(r"\s|://|\\n", text):
                return _aged(text[1:-1], pid)
    user = next((frame for frame in frames if is_users(_place(frame))), None)
    if user is None:
        return ""
    try:
        with open(_inside(user["filename"], pid), encoding="utf-8", errors="replace") as file:
            return " ".join(next(islice(file, user["line"] - 1, None), "").split())
    except (OSError, ValueError):
        return ""


def _aged(path: str, pid: int) -> str:
    try:
        age_s = time.time() - os.stat(_inside(path, pid)).st_mtime
    except (OSError, ValueError):
        return f"{path} (no such file now)"
    return f"{path} (written {seconds(max(0.0, age_s))} ago)"


def _place(frame: dict[str, Any]) -> str:
    return f"{frame['filename']}:{frame['line']} {frame['name']}"


def _inside(path: str, pid: int) -> str:
    """Path by which this process reaches it: the other may have another root or folder."""
    return f"/proc/{pid}/root{path}" if path.startswith("/") else f"/proc/{pid}/cwd/{path}"


def endless(frame: dict[str, Any], pid: int, began: float) -> frozenset[str] | None:
    """Names set by the endless loop around this line; None if the line is in none."""
    values = {x["name"]: x["repr"] for x in frame.get("locals") or () if _is_plain(x["repr"])}
    for low, high, test, names in _of_file(_loops, frame, pid, began):
        if low <= frame["line"] <= high and _holds(test, values):
            return names
    return None


def waiting(frame: dict[str, Any], pid: int, began: float) -> frozenset[str]:
    """Names set by loops around this line that only poll, sleep, count and log."""
    found = [names for low, high, names in _of_file(_polls, frame, pid, began)
             if low <= frame["line"] <= high]  # fmt: skip
    return frozenset().union(*found)


def _of_file(read: Any, frame: dict[str, Any], pid: int, began: float) -> Any:
    """Loops that `read` finds in a frame's file; none if it changed since the process began."""
    path = _inside(frame["filename"], pid)
    try:
        changed = os.stat(path).st_mtime
        return read(path, changed) if changed < began + _READ_S else ()
    except (OSError, ValueError, SyntaxError, RecursionError):
        return ()


def _is_plain(shown: str | None) -> bool:
    """True if a value is shown in full and is immutable."""
    if not shown or "..." in shown:
        return False
    return shown in ("None", "True", "False") or shown[0] == '"' or bool(_NUMBER.match(shown))


def _holds(test: str, values: dict[str, str]) -> bool:
    """True if a test of names and constants alone holds; False if a value is unknown."""
    try:
        known = {name: ast.literal_eval(shown) for name, shown in values.items()}
        return bool(eval(test, {"__builtins__": {}}, known))
    except (NameError, SyntaxError, TypeError, ValueError):
        return False


def _whiles(path: str) -> list[ast.While]:
    with open(path, "rb") as file:
        tree = parsed(file.read())
    return [node for node in ast.walk(tree) if isinstance(node, ast.While)]


def _set_by(nodes: list[ast.AST]) -> frozenset[str]:
    return frozenset(
        x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
    )


@lru_cache(64)
def _loops(path: str, _: float) -> tuple[tuple[int, int, str, frozenset[str]], ...]:
    """(first line, last line, test, names set) of loops that only their test can end."""
    found = []
    for loop in _whiles(path):
        nodes = [node for part in (loop.test, *loop.body) for node in ast.walk(part)]
        if loop.orelse or not all(isinstance(node, _PLAIN) for node in nodes):
            continue
        names = _set_by(nodes)
        # If it sets a name, its test may have another result next time.
        if not names or isinstance(loop.test, ast.Constant):
            last = loop.end_lineno or loop.lineno
            found.append((loop.lineno, last, ast.unparse(loop.test), names))
    return tuple(found)


@lru_cache(64)
def _polls(path: str, _: float) -> tuple[tuple[int, int, frozenset[str]], ...]:
    """(first line, last line, names set) of `while` loops that only poll and sleep."""
    found = []
    for loop in _whiles(path):
        inside = [node for part in loop.body for node in ast.walk(part)]
        called = [ast.unparse(x.func).rpartition(".")[2] for x in inside if isinstance(x, ast.Call)]
        asks = any(isinstance(node, ast.Call) for node in ast.walk(loop.test))
        if asks and "sleep" in called and set(called) <= _SAYS and _counts_alone(inside):
            found.append((loop.lineno, loop.end_lineno or loop.lineno, _set_by(inside)))
    return tuple(found)


def _counts_alone(nodes: list[ast.AST]) -> bool:
    """True if the nodes set plain names only, and contain no inner block, await or yield."""
    targets = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    begun = (ast.For, ast.With, ast.Try, ast.Await, ast.Yield, ast.YieldFrom, ast.FunctionDef)
    return all(isinstance(node, ast.Name) for node in targets) and not any(
        isinstance(node, begun) for node in nodes
    )
