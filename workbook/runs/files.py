"""Writing files atomically: a reader sees the old one or the new one, never a part."""

import base64
import contextlib
import fcntl
import io
import json
import math
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOOKS = 20  # at a lock that another process has
PATH = re.compile(r'\sd="[^"]*"')  # of an SVG


def write_atomically(path: str | Path, content: str | bytes) -> Path:
    """Write beside the target, then rename over it."""
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp gives 0600, which colleagues cannot read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def git(top: str | Path, *words: str) -> str:
    """Output of a git command in the folder `top`; "" if it fails or does not answer."""
    command, how = ["git", "-C", str(top), *words], {"text": True, "errors": "surrogateescape"}
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=20, **how).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def tracked_files(root: str | Path, *patterns: str) -> list[str]:
    """Paths of the files below `root` that git tracks, relative to it; only of `patterns` if given.

    Raises OSError or subprocess.CalledProcessError if git cannot list them.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", *patterns]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name]


def write_json(path: str | Path, content: Any) -> Path:
    """Write strict JSON, indented: a NaN becomes null, as JSON has none."""
    text = json.dumps(plain(content), indent=2, ensure_ascii=False, allow_nan=False)
    return write_atomically(path, text + "\n")


def write_notebook(path: str | Path, notebook: Any) -> Path:
    """Write a notebook (nbformat's node), ending with a newline as editors leave it."""
    import nbformat

    return write_atomically(path, nbformat.writes(notebook).rstrip("\n") + "\n")


def lighten(notebook: Any) -> Any:
    """Reduce PNGs in a notebook's outputs (nbformat's node) to 256 colours, a quarter of a plot's
    bytes, and return it: Git keeps every version of them. PNGs with a palette stay as they are."""
    from PIL import Image

    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data, written = output.get("data", {}), io.BytesIO()
            if "image/png" not in data:
                continue
            image = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
            if image.mode != "P":
                few = image.convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE)
                few.save(written, "png", optimize=True)
                data["image/png"] = base64.b64encode(written.getvalue()).decode()
    return notebook


def rounded_paths(svg: str) -> str:
    """Round the coordinates of an SVG's paths to hundredths of a point, which nobody sees."""
    return PATH.sub(lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)


def read_json(path: str | Path, default: Any = None) -> Any:
    """Content of a JSON file, or `default` if there is no such file or it is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return default


def read_object(path: str | Path) -> dict[str, Any]:
    """Content of a JSON file, or {} if there is no such file or it holds no object."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def locked(file: Path) -> Iterator[int | None]:
    """Lock a file, and yield its descriptor; None if another process has the lock. The lock is
    released when this process and those that inherit the descriptor have closed it or ended."""
    handle, mine = os.open(file, os.O_RDWR | os.O_CREAT, 0o644), None
    try:
        for again in range(LOOKS):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = handle
                break
            except BlockingIOError:
                if again + 1 < LOOKS:  # `is_locked` of another process may have it for an instant
                    time.sleep(0.01)
        yield mine
    finally:
        os.close(handle)


def is_locked(file: Path) -> bool:
    """True if a process, on this machine or another one that shares its files' locks, has it."""
    try:
        with file.open("rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False


def plain(value: Any) -> Any:
    """Convert numpy scalars, paths and tuples to JSON types."""
    if value is None or type(value) in (str, int, bool):  # nearly all, at a quarter of the time
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (str, int, float, bool)):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)
