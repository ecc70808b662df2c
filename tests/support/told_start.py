"""Facts that a process can tell of its start, for tests that compare two starts."""

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path


def told(spec: dict) -> dict:
    """Everything that a start decides, of this process; its own number stands as "me"."""
    proc = Path("/proc/self")
    main = sys.modules["__main__"]
    limits = (name for name in sorted(dir(resource)) if name.startswith("RLIMIT_"))
    masks = "SigBlk", "SigIgn", "Seccomp:", "NoNewPrivs", "CapEff"
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "environ": dict(os.environ),
        "cmdline": (proc / "cmdline").read_text().split("\0"),
        "proc environ": sorted(filter(None, (proc / "environ").read_text().split("\0"))),
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "streams": [os.readlink(f"/proc/self/fd/{number}") for number in range(3)],
        "open": len(os.listdir("/proc/self/fd")),
        "text": [[f.encoding, f.errors, f.line_buffering, f.write_through, f.isatty()]
                 for f in (sys.stdin, sys.stdout, sys.stderr)],
        "main": [sorted(vars(main)), main.__name__, main.__file__, main.__spec__.name],
        "options": sys._xoptions,
        "interrupt": str(signal.getsignal(signal.SIGINT)),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "status": [x for x in (proc / "status").read_text().splitlines() if x.startswith(masks)],
        "threads": [thread.name for thread in threading.enumerate()],
        "exe": os.readlink("/proc/self/exe"),
        "umask": os.umask(0o22),
        "given": spec,
    }  # fmt: skip


def rest(spec: dict) -> dict:
    """Says that it is there, and waits to be interrupted."""
    Path(spec["there"]).touch()
    time.sleep(60)
    return {}
