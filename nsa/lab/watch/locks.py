"""For which Python lock each thread of this process waits, and who holds it."""

from __future__ import annotations

from pathlib import Path


def write(folder: Path, key: int | str) -> None:
    """Leaves locks-KEY.json in `folder`."""
