"""User code lines of torch calls: a named range around each call, for a profile to read."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from whyhung.verdict.frames import is_code, library
from whyhung.watch.counting import in_place_of
from workbook.lab.measure.allocators import LINE

named_range = torch._C._profiler._RecordFunctionFast


class Lines(TorchFunctionMode):
    """Mode that runs each torch call from Python in a range "line FILE:LINE FUNCTION".

    The line is the innermost outside torch and the standard library. Operators run unchanged: the
    interception is in Python, and ends before autograd and the dispatcher begin. (With a dispatch
    mode on, some backwards have other results to allocate.) Use it by `line_ranges`: there it is
    also on in a backward, where a user-defined Function calls torch from Python.

    Do not use it if anything was compiled: dynamo would trace it. Cost: 2 us per call.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(getattr(func, "__module__", "")).startswith("torch._ops.profiler"):
            return func(*args, **(kwargs or {}))  # a foreign named range, which outlives the call
        with named_range(f"{LINE}{calling(sys._getframe(1))}"):
            return func(*args, **(kwargs or {}))


@contextmanager
def line_ranges() -> Iterator[None]:
    """Turn `Lines` on inside, in backwards as well."""
    mode = Lines()

    def watched(plain: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            with mode:  # torch turns the mode off inside its handlers, also for a backward
                return plain(*args, **options)

        return run

    undo = in_place_of(torch.autograd, "_engine_run_backward", watched)
    try:
        with mode:
            yield
    finally:
        undo()


def calling(frame: FrameType | None) -> str:
    """Return "train.py:31 Net.forward", the innermost frame in user code; without one, the
    innermost outside torch and the standard library; else ""."""
    other = ""
    while frame is not None:
        name, own = _told(frame.f_code)
        if own:
            return f"{name[0]}:{frame.f_lineno} {name[1]}"
        if name and not other:
            other = f"{name[0]}:{frame.f_lineno} {name[1]}"
        frame = frame.f_back
    return other


@lru_cache(maxsize=4096)
def _told(code: CodeType) -> tuple[tuple[str, str] | None, bool]:
    """Return (file and function, None outside user code and workbook.lab; True if user code)."""
    frame = f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"
    own = is_code(frame)
    if code.co_filename == __file__ or not (own or library(frame) == "workbook.lab"):
        return None, False
    return (shown(code.co_filename), code.co_qualname.replace(".<locals>", "")), own


def shown(file: str) -> str:
    """Return a path relative to the current folder, else to an entry of sys.path if possible."""
    for place in (os.getcwd(), *sorted(map(os.path.abspath, sys.path), key=len, reverse=True)):
        if file.startswith(place + os.sep):
            return file[len(place) + 1 :]
    return file
