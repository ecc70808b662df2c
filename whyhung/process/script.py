"""Scripts as subjects, run unmodified: "train.py", or "package.module" as by python -m."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import fcntl
import importlib.util
import os
import runpy
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def is_script(subject: str) -> bool:
    """Return True if it is run as a program; any other, "package.module:make", makes a subject."""
    return ":" not in subject or is_file(subject)


def is_file(subject: str) -> bool:
    """Return True if it names a file rather than a module."""
    return subject.endswith((".py", ".ipynb")) or os.sep in subject or os.path.isfile(subject)


def check(subject: str) -> None:
    """Raise ValueError, with a remedy, for a script or a module that cannot be run."""
    if is_file(subject):
        if why := _no_script(Path(subject)):
            raise ValueError(f"subject={subject!r} {why}")
        return
    if os.path.isdir(subject) and not os.path.isfile(os.path.join(subject, "__main__.py")):
        raise ValueError(f"subject={subject!r} {_no_script(Path(subject))}")
    try:
        spec = importlib.util.find_spec(subject)
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = importlib.util.find_spec(f"{subject}.__main__")
    except (ImportError, ValueError):
        spec = None
    if spec is not None:
        return
    beside = subject.replace(".", os.sep) + ".py"
    raise ValueError(
        f"subject={subject!r}: there is no module of that name that can be run, and no file "
        f"{beside}; a script is named by its path, what makes steps as 'package.module:function'"
    )


def _no_script(file: Path) -> str:
    if file.is_dir():
        inside = sorted(one.name for one in file.glob("*.py") if one.stem != "__init__")[:4]
        hint = f"; name its script: {', '.join(str(file / name) for name in inside)}"
        return f"is a folder{hint if inside else ' without scripts'}"
    if not file.exists():
        others = sorted(one.name for one in file.parent.glob("*.py"))
        near = difflib.get_close_matches(file.name, others, n=1) if len(others) > 4 else others
        hint = f"; known are {', '.join(near or others)}" if others else ""
        return f"is no file in {Path.cwd()}{hint}"
    if file.suffix == ".ipynb":
        made = file.with_suffix(".py")
        return (
            f"is a notebook; make a script of it: jupyter nbconvert --to script {file}, "
            f"then subject={made}"
        )
    return "" if os.access(file, os.R_OK) else "cannot be read"


def arguments(argv: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """Return the script's arguments, with {lr} in them replaced by the setting lr.

    Raises ValueError for a setting that no argument names: a script gets nothing else.
    """
    words, unnamed = [str(word) for word in argv], []
    for name, value in settings.items():
        mark = f"{{{name}}}"
        if not any(mark in word for word in words):
            unnamed.append(name)
        words = [word.replace(mark, str(value)) for word in words]
    if unnamed:
        name = unnamed[0]
        raise ValueError(
            f"{name}={settings[name]!r}: a script has no settings, only words; "
            f"argv='--{name} {{{name}}}' hands it on"
        )
    return words


def run(
    subject: str,
    argv: Sequence[str],
    progress: Any,
    begin: Callable[[int], None] = lambda step: None,
    end: Callable[[int], None] = lambda step: None,
) -> int:
    """Run it to its end as `__main__`; return the number of steps that its optimizers made.

    begin, end: called around each step. Returns where Python would exit with 0, so after its
    threads and atexit handlers; raises whatever it raises, and SystemExit for another code.
    """
    with _counted_steps(progress, begin, end) as count:
        code: Any = None
        try:
            if is_file(subject):
                _as_python_does(subject, argv)
            else:
                sys.argv = [subject, *argv]
                runpy.run_module(subject, run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code
        progress.enter("end")
        threading._shutdown()  # as Python does: ends idle pools, waits for threads
        atexit._run_exitfuncs()
        if code not in (None, 0):
            raise SystemExit(code)
        return count.done


def _as_python_does(file: str, argv: Sequence[str]) -> None:
    """Run the file as `python file argv...` does. runpy would put the path in argv[0], and remove
    `__main__` again, which objects pickled at the end still need."""
    path = os.path.abspath(file)
    if sys.path[0] in ("", os.getcwd()):  # from `python -m`, by which this process was started
        del sys.path[0]
    sys.path.insert(0, os.path.dirname(os.path.realpath(file)))
    sys.argv = [file, *argv]
    module = types.ModuleType("__main__")
    module.__file__, module.__builtins__ = path, __builtins__
    sys.modules["__main__"] = module
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


@contextlib.contextmanager
def _counted_steps(
    progress: Any, begin: Callable[[int], None], end: Callable[[int], None]
) -> Iterator[types.SimpleNamespace]:
    """Follow the steps of `progress`, which the script's first optimizer counts."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from whyhung.watch.layout import BEGAN_NS, STEP

    progress.attach(steps=True)
    # The clock runs from the first line, though no step may ever come.
    progress.cells[BEGAN_NS] = time.monotonic_ns()
    count = types.SimpleNamespace(done=0)

    def stepped(*_: Any) -> None:  # after the hook of `attach`, which was there before
        if progress.cells[STEP] > count.done:
            end(count.done)
            count.done = progress.cells[STEP]
            begin(count.done)

    begin(0)
    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield count
    finally:
        hook.remove()


def keep_output_short() -> None:
    """Flush output line by line, and append it to its file even after that was cut."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            fcntl.fcntl(number, fcntl.F_SETFL, flags | os.O_APPEND)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.reconfigure(line_buffering=True)
