"""Find the files that a program depends on, without libraries: by reading them, and by running it.

Reading follows import statements from file to file and executes nothing. Imports by computed names
are only known once the program has run, see `loaded`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import site
import sys
import sysconfig
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

# Packages that a trial depends on as a whole, and parts of them that no trial imports.
PACKAGES: dict[Path, tuple[str, ...]] = {Path(__file__).resolve().parents[1]: ()}
GONE = "gone"
FRESH_NS = 2 * 10**9  # a file written so recently may be written again with the same timestamp
_COMMENT = re.compile(r"#.*")
_IMPORT = re.compile(
    r"(?:^|[;:])[ \t]*(?:"
    r"from[ \t]*(\.*)[ \t]*([\w.]*)[ \t]*\bimport\b[ \t]*(\([^)]*\)|[^\n;]+)"
    r"|import[ \t]+([^\n;]+))",
    re.MULTILINE,
)
_kept: dict[tuple[str, str], tuple[tuple[int, int], Any]] = {}  # (what, file): (stamp, result)


def hash_of(file: str) -> str:
    """Return the hash of the file's content; GONE if it cannot be read."""
    try:
        return _once("hash", file, _digest)
    except OSError:
        return GONE


def hashes(files: Iterable[str]) -> dict[str, str]:
    return {file: hash_of(file) for file in files}


def closure(start: Iterable[str], folder: str | None = None) -> list[str]:
    """Return the files `start`, and all that their imports lead to outside the libraries, sorted.

    folder: where Python searches first, a script's own. Files of PACKAGES are left out.
    """
    roots = [os.path.abspath(place) for place in (*filter(None, [folder]), *sys.path)]
    roots = [place for place in dict.fromkeys(roots) if not is_library(place)]
    found: dict[str, None] = {}
    known: dict[tuple[str, ...], list[str]] = {}
    waiting = [os.path.realpath(file) for file in start]
    while waiting:
        file = waiting.pop()
        if file in found or _of_packages(file):
            continue
        found[file] = None
        with contextlib.suppress(OSError):
            for level, name in _once("imports", file, _imports):
                above = os.path.dirname(file)
                for _ in range(level - 1):
                    above = os.path.dirname(above)
                key = (above if level else "", name)
                if key not in known:
                    known[key] = _relative(above, name) if level else files_of(name, roots)
                waiting += known[key]
    return sorted(found)


def files_of(module: str, roots: list[str] | None = None) -> list[str]:
    """Return the files that `import module` runs, its packages' first; [] for a library's.

    Names after the last module's are ignored: they may name a function.
    """
    if roots is None:
        places = map(os.path.abspath, sys.path)
        roots = [place for place in dict.fromkeys(places) if not is_library(place)]
    top, _, below = module.partition(".")
    for root in roots:
        if found := _below(root, module):
            return found
    if top in sys.stdlib_module_names:
        return []
    # A project installed in editable mode has its own finder.
    return [f for place in _found_elsewhere(top) for f in (place, *_beside(place, below))]


def loaded() -> dict[str, str]:
    """Return {file: hash} of the files that this process imported from outside the libraries."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] in ("torch", "triton"):
            continue  # torch registers code that it generates
        file = os.path.realpath(file)
        if not is_library(file) and not _of_packages(file):
            found[file] = hash_of(file)
    return found


@lru_cache(maxsize=4096)
def is_library(place: str) -> bool:
    """Return True for a path in the standard library, or where packages are installed."""
    real = os.path.realpath(place) + os.sep
    installed = any(
        f"{os.sep}{name}{os.sep}" in real for name in ("site-packages", "dist-packages")
    )
    return installed or real.startswith(_libraries())


@lru_cache(maxsize=1)
def _libraries() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    places = [sysconfig.get_path(name) for name in names] + [site.getusersitepackages()]
    return tuple(os.path.realpath(place) + os.sep for place in places if place)


def of_packages() -> list[str]:
    """Return all files that PACKAGES name, sorted."""
    return sorted(
        str(file)
        for package, not_run in PACKAGES.items()
        for file in package.rglob("*.py")
        if file.relative_to(package).parts[0] not in not_run
    )


def _of_packages(file: str) -> bool:
    return file.startswith(tuple(f"{package}{os.sep}" for package in PACKAGES))


def _once(what: str, file: str, make: Any) -> Any:
    """Return `make(file)` for the file as it is now, cached."""
    status = os.stat(file)
    stamp, settled = (status.st_mtime_ns, status.st_size), time.time_ns() - status.st_mtime_ns
    before = _kept.get((what, file))
    if before is not None and before[0] == stamp:
        return before[1]
    made = make(file)
    if settled > FRESH_NS:
        _kept[what, file] = stamp, made
    return made


def _digest(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def _imports(file: str) -> list[tuple[int, str]]:
    """Return (level, dotted name) of all text that looks like an import statement.

    A parser takes twenty times as long; a sentence in a string that looks like one does no harm.
    """
    text = _COMMENT.sub("", Path(file).read_text(encoding="utf-8", errors="replace"))
    found: dict[tuple[int, str], None] = {}
    for dots, base, names, plain in _IMPORT.findall(text.replace("\\\n", " ")):
        for name in (plain or names).strip("()").split(","):
            word = name.split()[0] if name.split() else ""
            # Each of `from a import b, c` may be a module.
            parts = [part for part in (base, word) if part and part != "*"]
            found[len(dots), ".".join(parts)] = None
    return list(found)


def _below(root: str, module: str) -> list[str]:
    found, place = [], root
    for part in filter(None, module.split(".")):
        place = os.path.join(place, part)
        if os.path.isfile(init := os.path.join(place, "__init__.py")):
            found.append(os.path.realpath(init))
        elif os.path.isfile(f"{place}.py"):
            return [*found, os.path.realpath(f"{place}.py")]
        elif not os.path.isdir(place):
            break
    return found


def _relative(folder: str, name: str) -> list[str]:
    init = os.path.join(folder, "__init__.py")
    return [*([init] if os.path.isfile(init) else []), *_below(folder, name)]


@lru_cache(maxsize=1024)
def _found_elsewhere(top: str) -> tuple[str, ...]:
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return ()
    origin = spec.origin if spec is not None else None
    if not origin or not origin.endswith(".py") or is_library(origin):
        return ()
    return (os.path.realpath(origin),)


def _beside(init: str, below: str) -> list[str]:
    return _below(os.path.dirname(init), below) if init.endswith("__init__.py") else []
