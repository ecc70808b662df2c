"""Did a process run out of memory? From what it said, and from what the kernel counted."""

import errno
from pathlib import Path

_PHRASES = (
    "out of memory",  # CUDA, HIP, Triton
    "can't allocate memory",  # torch's CPU allocator
    "cublas_status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or one that it came from, says that memory was asked for in vain."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, MemoryError):
            return True
        if isinstance(current, OSError) and current.errno == errno.ENOMEM:
            return True
        # By name: this module is also loaded by trials that never import torch.
        if any(kind.__name__ == "OutOfMemoryError" for kind in type(current).__mro__):
            return True
        if isinstance(current, RuntimeError) and any(p in str(current).lower() for p in _PHRASES):
            return True
        current = current.__cause__ or current.__context__
    return False


def kernel_kills(
    root: str | Path = "/sys/fs/cgroup", membership: str | Path = "/proc/self/cgroup"
) -> int | None:
    """How often the kernel has killed for memory in this process's control group, 1 or 2.

    None where that is not told, as outside Linux.
    """
    try:
        lines = Path(membership).read_text().splitlines()
    except OSError:
        return None
    places = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, name = Path(root), "memory.events"
        elif "memory" in controllers.split(","):
            folder, name = Path(root, "memory"), "memory.oom_control"
        else:
            continue
        # A container may see its own group as the root of the mount.
        places += [folder / path.lstrip("/") / name, folder / name]
    for place in places:
        try:
            told = dict(line.split(maxsplit=1) for line in place.read_text().splitlines())
            return int(told["oom_kill"])
        except (OSError, KeyError, ValueError):
            continue
    return None
