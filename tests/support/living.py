"""Whether processes still live, as tests ask."""

import time
from pathlib import Path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids, within_s=5.0):
    """Those that live on."""
    end = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]
