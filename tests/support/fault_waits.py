"""`python fault_waits.py NAME...`: what a process in each of these faults looks like from outside.

Prints {name: {"step", "cpu_s" in WATCHED_S, "state", "beats"}}. Each is a fork of this process.
"""

import json
import mmap
import os
import signal
import struct
import sys
import threading
import time

from planted import made

from nsa.experiments.selfcheck.faults.registry import chosen
from nsa.experiments.selfcheck.faults.small import FROM_STEP

WATCHED_S, LONGEST_S = 0.4, 10.0
TICK = os.sysconf("SC_CLK_TCK")


def child(fault, shared):
    """Beats every 20 ms while the GIL can be had, and trains until the fault stops it."""

    def beat():
        count = 0
        while True:
            count += 1
            struct.pack_into("q", shared, 8, count)
            time.sleep(0.02)

    threading.Thread(target=beat, daemon=True).start()
    subject = made(fault)
    for step in range(fault.steps):
        struct.pack_into("q", shared, 0, step)
        subject.step(step)


def looked_at(pid, shared):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / TICK
    step, beats = struct.unpack_from("qq", shared, 0)
    return {"step": step, "beats": beats, "state": fields[0], "cpu_s": cpu_s}


def watched(fault):
    shared = mmap.mmap(-1, 16)
    pid = os.fork()
    if pid == 0:
        try:
            child(fault, shared)
        finally:
            os._exit(0)
    try:
        end = time.monotonic() + LONGEST_S
        while looked_at(pid, shared)["step"] < FROM_STEP and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.1)
        before = looked_at(pid, shared)
        time.sleep(WATCHED_S)
        after = looked_at(pid, shared)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return after | {name: after[name] - before[name] for name in ("cpu_s", "beats")}


if __name__ == "__main__":
    made(chosen(["healthy"])[0])  # an optimizer loads much of torch, here once for all
    print(json.dumps({fault.name: watched(fault) for fault in chosen(sys.argv[1:])}))
