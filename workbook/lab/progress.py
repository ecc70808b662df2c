"""Progress display: a bar in an interactive session, lines in a log."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def session() -> Path | None:
    """Path of the notebook whose kernel this is, if it is open in JupyterLab, Notebook or VS Code.
    None under papermill, nbval and `nsa run`, and in a plain program."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    if shell is None or headless() or "NSA_RUN" in os.environ:
        return None
    name = os.environ.get("JPY_SESSION_NAME") or shell.user_ns.get("__vsc_ipynb_file__")
    path = Path(name) if name else None
    if path and not path.is_file():
        path = Path.cwd() / path.name  # the server may give it relative to its own root
    return path if path and path.suffix == ".ipynb" and path.is_file() else None


def headless() -> bool:
    """Return True if NSA_HEADLESS is set; empty and 0 count as unset."""
    return os.environ.get("NSA_HEADLESS", "0") not in ("", "0")


@contextlib.contextmanager
def lines(total: int, progress: bool, unit: str = "cell") -> Iterator[Callable[..., None]]:
    """Yield say(line, count, again): sets the text beside the bar in an open notebook, or prints a
    line above the bar in a terminal, else a line on stderr.

    count: position among all, shown by a bar anyway. again: the line's cell is already counted.
    """
    bar: Any = None
    here = progress and session()
    if here or (progress and sys.stderr.isatty() and not headless()):
        with contextlib.suppress(ImportError):
            from tqdm.auto import tqdm

            bar = tqdm(total=total, unit=unit)

    def say(line: str, count: str = "", again: bool = False) -> None:
        if bar is None:
            if progress:
                print(f"{count}{line}{' (again, alone)' * again}", file=sys.stderr, flush=True)
            return
        if here:
            bar.set_postfix_str(line)
        else:
            bar.write(line, file=sys.stderr)
        bar.update(bool(count) and not again)

    with bar if bar is not None else contextlib.nullcontext():
        yield say
