"""Loops that only their own variables can end: read from the source, without running anything."""

from __future__ import annotations

import ast
import linecache
import re
from functools import lru_cache

_FRAME = re.compile(r"^(.*?):(\d+) (.*)$")
# What such a loop may consist of: no call, no attribute, nothing that others could change.
_ALLOWED = (
    ast.While, ast.If, ast.Pass, ast.Continue, ast.Assign, ast.AugAssign, ast.Expr, ast.Name,
    ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.operator,
    ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip


def closed(frame: str) -> bool:
    """Whether "file:line function" is inside a `while` that only the function's locals could end.

    False where the source is not there.
    """
    found = _FRAME.match(frame)
    return found is not None and _closed(found[1], int(found[2]))


@lru_cache(maxsize=256)
def _closed(file: str, line: int) -> bool:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return False
    function: ast.AST = tree
    loop = None
    for node in ast.walk(tree):
        if not getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", 0) or 0):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function, loop = node, None
        elif isinstance(node, ast.While):
            loop = node  # of several the innermost comes last
    if loop is None:
        return False
    inside = list(ast.walk(loop))
    if any(isinstance(node, ast.Break | ast.Return) for node in inside):
        return False
    if not all(isinstance(node, _ALLOWED) for node in inside):
        return False
    used = {node.id for node in inside if isinstance(node, ast.Name)}
    return used <= _locals(function)


def _locals(function: ast.AST) -> set[str]:
    """Names that a function alone can change: none of a module, nor of what it shares."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    inside = list(ast.walk(function))
    shared = {x for n in inside if isinstance(n, ast.Global | ast.Nonlocal) for x in n.names}
    # what an inner function sees, it may change
    shared |= {
        name.id
        for node in inside
        if node is not function
        and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for name in ast.walk(node)
        if isinstance(name, ast.Name)
    }
    made = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    made |= {n.arg for n in inside if isinstance(n, ast.arg)}
    return made - shared
