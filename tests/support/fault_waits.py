"""`python fault_waits.py NAME...`: what a process in each of these faults looks like from outside.

Prints {name: {"step", "cpu_s" in WATCHED_S, "state", "beats"}}. Each is a fork of this process.
"""

import json
import os
import signal
import sys
import threading
import time
from multiprocessing import RawArray

import psutil
from planted import made

from nsa.experiments.selfcheck.faults.registry import chosen
from nsa.experiments.selfcheck.faults.small import FROM_STEP

WATCHED_S, LONGEST_S = 0.4, 10.0


def child(fault, shared):
    """Beats every 20 ms while the GIL can be had, and trains until the fault stops it."""

    def beat():
        while True:
            shared[1] += 1
            time.sleep(0.02)

    threading.Thread(target=beat, daemon=True).start()
    subject = made(fault)
    for step in range(fault.steps):
        shared[0] = step
        subject.step(step)


def looked_at(process, shared):
    used = process.cpu_times()
    found = {"step": shared[0], "beats": shared[1], "state": process.status()}
    return found | {"cpu_s": used.user + used.system}


def watched(fault):
    shared = RawArray("q", 2)  # step, beats
    pid = os.fork()
    if pid == 0:
        try:
            child(fault, shared)
        finally:
            os._exit(0)
    process = psutil.Process(pid)
    try:
        end = time.monotonic() + LONGEST_S
        while shared[0] < FROM_STEP and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.1)
        before = looked_at(process, shared)
        time.sleep(WATCHED_S)
        after = looked_at(process, shared)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return after | {name: after[name] - before[name] for name in ("cpu_s", "beats")}


if __name__ == "__main__":
    made(chosen(["healthy"])[0])  # an optimizer loads much of torch, here once for all
    print(json.dumps({fault.name: watched(fault) for fault in chosen(sys.argv[1:])}))
