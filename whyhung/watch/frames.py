"""Locate a Python frame in its source, and look up the values of expressions there.

No code of the program runs: an expression is names, attributes and subscripts, looked up in plain
dicts, and anything that would call a property or a method of the program has no value here.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import linecache
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import CodeType, FrameType, MemberDescriptorType, ModuleType
from typing import Any

_PARSING = threading.Lock()
NOTHING = object()  # value of an expression that has none
BIGGEST = 2**20  # characters read of a file
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


@dataclass
class Source:
    """With statements and method calls of one function, in source order."""

    withs: list[ast.With] = field(default_factory=list)
    calls: list[ast.Call] = field(default_factory=list)  # of X.name(...)


def parsed(source: str | bytes) -> ast.Module:
    """Call ast.parse, which in CPython 3.11 raises SystemError if two threads run it at once.

    A lock serializes our threads; after a collision with a thread of the program it is retried.
    """
    with _PARSING:
        for _ in range(3):
            with contextlib.suppress(SystemError):
                return ast.parse(source)
        return ast.parse(source)


def source_of(code: CodeType) -> Source:
    """Source of a code object; empty if it is missing or does not match the code."""
    lines = lines_of(code.co_filename)
    first = code.co_firstlineno - 1
    found = Source()
    if code.co_name == "<module>":
        tree: Any = parsed("".join(lines))
    else:
        block = inspect.getblock(lines[first:])
        inner = block and block[0][:1].isspace()
        tree = parsed(("if 1:\n" if inner else "") + "".join(block))
        tree = next((n for n in ast.walk(tree) if getattr(n, "name", "") == code.co_name), None)
        if tree is None:
            return found
        ast.increment_lineno(tree, first - bool(inner))
    for node in _own(tree):
        if isinstance(node, ast.With):
            found.withs.append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.calls.append(node)
    return found


def _own(scope: Any) -> Iterator[ast.AST]:
    """Nodes of a function or module, without those of functions and classes nested in it."""
    waiting = list(scope.body)
    for node in waiting:  # which grows
        if not isinstance(node, Scope):
            yield node
            waiting.extend(ast.iter_child_nodes(node))


def lines_of(name: str) -> list[str]:
    cached = linecache.cache.get(name, ())
    if len(cached) == 4:  # for example a notebook's cells, which have no file
        return list(cached[2])
    with open(name, encoding="utf-8", errors="replace") as file:
        return file.read(BIGGEST).splitlines(keepends=True)


@dataclass(frozen=True)
class Place:
    """Current instruction of a frame. Python 3.10 provides line numbers alone."""

    line: int
    enters: bool  # it enters a with statement
    calls: bool
    start: tuple[int, int] | None  # (line, column) of its source
    end: tuple[int, int] | None
    nth: int  # index among the items entered on this line


def place(frame: FrameType) -> Place:
    code, at, line = frame.f_code, frame.f_lasti, frame.f_lineno
    names = [(i, dis.opname[code.co_code[i]]) for i in range(0, at + 1, 2)]
    names = [(i, name) for i, name in names if name != "CACHE"]
    entered, before = [], ""
    for offset, name in names:
        called = name.startswith(("CALL", "PRECALL"))
        if name in ("BEFORE_WITH", "SETUP_WITH") or (called and before == "LOAD_SPECIAL"):
            entered.append(offset)
        before = name
    now = names[-1][0] if names else -1
    enters = now in entered
    calls = before.startswith(("CALL", "PRECALL")) and not enters
    nth = 0
    if enters:
        begun = [n for begin, end, n in code.co_lines() for i in entered[:-1] if begin <= i < end]
        nth = begun.count(line)
    start = end = None
    if hasattr(code, "co_positions") and at >= 0:
        l1, l2, c1, c2 = next(islice(code.co_positions(), at // 2, None))
        if l1 and l2 and c1 is not None and c2 is not None:
            start, end = (l1, c1), (l2, c2)
    return Place(line, enters, calls, start, end, nth)


def entering(source: Source, at: Place) -> tuple[ast.With, int] | None:
    """With statement that is being entered, and the index of its item; None if there is none."""
    if not at.enters:
        return None
    found = [w for w in source.withs if w.lineno <= at.line <= _header_end(w)]
    for node in sorted(found, key=lambda w: w.lineno, reverse=True):
        same = [item.context_expr.lineno == at.line for item in node.items]
        item = at.nth
        if at.line != node.lineno and any(same):  # items on lines of their own
            item += same.index(True)
        if item < len(node.items):
            return node, item
    return None


def calling(source: Source, at: Place) -> ast.Call | None:
    """Method call in progress; where only lines are known, the only call on the line, else None."""
    if not at.calls:
        return None
    if at.end is not None:
        ends = [c for c in source.calls if (c.end_lineno, c.end_col_offset) == at.end]
        return ends[0] if ends else None
    found = [c for c in source.calls if c.lineno <= at.line <= (c.end_lineno or 0)]
    return found[0] if len(found) == 1 else None


def _header_end(node: ast.With) -> int:
    return max(item.context_expr.end_lineno or 0 for item in node.items)


def within(node: ast.With, at: Place) -> bool:
    """True if the frame is in the statement's body."""
    first, last = node.body[0], node.body[-1]
    if not first.lineno <= at.line <= (last.end_lineno or 0):
        return False
    if first.lineno > _header_end(node):
        return True
    return at.start is not None and at.start >= (first.lineno, first.col_offset)


def value(node: ast.expr, frame: FrameType) -> Any:
    """Value of the expression in the frame; NOTHING if it cannot be looked up safely."""
    if isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals):
            if node.id in names:
                return names[node.id]
    elif isinstance(node, ast.Attribute):
        return attribute(value(node.value, frame), node.attr)
    elif isinstance(node, ast.Subscript):
        held, key = value(node.value, frame), node.slice
        index = key.value if isinstance(key, ast.Constant) else value(key, frame)
        if type(index) in (int, str) and type(held) in (dict, list, tuple):
            try:
                return held[index]
            except (LookupError, TypeError):
                return NOTHING
    return NOTHING


def attribute(held: Any, name: str) -> Any:
    """Value of held.name if it is in a dict or a slot; NOTHING if there is none."""
    if held is NOTHING:
        return NOTHING
    if isinstance(held, ModuleType):
        return object.__getattribute__(held, "__dict__").get(name, NOTHING)
    found = inspect.getattr_static(held, name, NOTHING)
    if type(found) is MemberDescriptorType:
        try:
            return found.__get__(held)
        except AttributeError:
            return NOTHING
    return found
