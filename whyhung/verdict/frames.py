"""Separate a stack's user frames from those of libraries, and summarize the latter.

A frame is "file:line function", a stack has its innermost frame first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import PurePosixPath

_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/:]+)")
_STANDARD = re.compile(r"/lib(?:64)?/python3[^/]*/([^/:]+)|/python3\d+\.zip/([^/:]+)")
# Frames of a torch built in its source tree; ~/torch/train.py is a user's own.
_TORCH = re.compile(
    r"(?:^|/)torch/(?:_[^/]*|ao|amp|autograd|backends|compiler|cuda|distributed|export|func|futures"
    r"|fx|jit|library|linalg|multiprocessing|nn|optim|profiler|storage|utils)(?:/|\.py:)"
    r"|(?:^|/)torch/(?:functional|serialization|random|overrides)\.py:"
)
_OURS = re.compile(r"(?:^|/)(?:whyhung/(?:process|watch|verdict|\w+\.py:)|nsa/(?:lab|cli)/)")
_TYPED = ("<string>", "<stdin>", "<console>", "<ipython")  # has no file, but is the user's
_FILE = re.compile(r"^(.*?):(\d+) (.*)$")


@lru_cache(maxsize=4096)  # stacks of thousands of threads have few frames that differ
def library(frame: str) -> str:
    """Return the library of a frame: "torch", "threading", "numpy"; "" for the user's own."""
    if found := _PACKAGE.search(frame):
        return found[1].removesuffix(".py")
    if found := _STANDARD.search(frame):
        return (found[1] or found[2]).removesuffix(".py")
    if _TORCH.search(frame):
        return "torch"
    if _OURS.search(frame):
        return "whyhung"
    found = _FILE.match(frame)
    file = found[1] if found else frame
    if file.startswith("<frozen "):
        return file[len("<frozen ") :].rstrip(">").partition(".")[0]
    if file.startswith("<"):
        return "" if file.startswith(_TYPED) else "code made at run time"
    if found is None or file.endswith((".so", ".c", ".cpp", ".cc")) or ".so." in file:
        return "native code"
    # torchrun, nsa, accelerate: a launcher is not the program
    return "a command" if re.search(r"/bin/[^/.]+$", file) else ""


def is_users(frame: str) -> bool:
    """Return True unless of the standard library, a package, torch or this project's lab."""
    return not library(frame)


def is_code(frame: str) -> bool:
    """Return True unless of torch, the standard library or this project's lab; packages count."""
    package = _PACKAGE.search(frame)
    if package is None:
        return is_users(frame)
    return package[1].removesuffix(".py") != "torch" and _OURS.search(frame) is None


def user_frames(frames: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (the user's frames, frames called by the innermost of them), both innermost first."""
    mine = [
        number
        for number, frame in enumerate(frames)
        # with the method "spawn" a worker's outermost frame is a string that calls multiprocessing
        if is_users(frame)
        and not (
            frame.startswith("<string>")
            and "/multiprocessing/" in "".join(frames[number - 1 : number])
        )
    ]
    return [frames[n] for n in mine], list(frames[: mine[0]] if mine else frames)


def user_line(frames: Sequence[str]) -> str:
    """Return the user's innermost frame, "train.py:31 evaluate"; "" if there is none."""
    own, _ = user_frames(frames)
    return short(own[0]) if own else ""


def nearest(frames: Sequence[str]) -> str:
    """Return the user's line; else that of an installed package; else the innermost."""
    installed = [frame for frame in frames if _PACKAGE.search(frame) and library(frame) != "torch"]
    return user_line(frames) or next(map(short, [*installed, *frames]), "")


def short(frame: str) -> str:
    """Return the frame with its file's name only; with its folder too if the name is generic."""
    found = _FILE.match(frame)
    if found is None or found[1].startswith("<"):
        return frame
    path = PurePosixPath(found[1].replace("\\", "/"))
    little = path.name.startswith("__") or path.parent.name.startswith("ipykernel")
    function = found[3].replace(".<locals>.", ".")
    return f"{'/'.join(path.parts[-2:]) if little else path.name}:{found[2]} {function}"


def is_in(frames: Sequence[str], file: str, function: str) -> bool:
    """Return True if a frame is that function, or a method of that name, of that file."""
    return any(file in f and re.split(r"[ .]", f)[-1] == function for f in frames)


def folded(frames: Sequence[str]) -> str:
    """Return "3 frames of torch, 2 of threading", libraries in order; "" for none."""
    counts = Counter(filter(None, map(library, frames)))
    told = [f"{count} of {name}" for name, count in counts.items()]
    if not told:
        return ""
    first = counts[next(iter(counts))]
    told[0] = told[0].replace(" of ", " frame of " if first == 1 else " frames of ", 1)
    return ", ".join(told)
