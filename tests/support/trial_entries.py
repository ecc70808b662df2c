"""Functions that tests run in child processes and ranks; each ends in its own way."""

import os
import signal
import subprocess
import sys
import time

from whyhung.process.child import so_far, standing


def echo(spec):
    print("on stdout")
    return {"spec": spec, "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0)}


def environment(spec):
    return {"value": os.environ.get(spec["name"])}


def half(spec):
    """Stores what it has twice, then ends as spec says: one more call, a result, or a sleep."""
    for number in (1, 2):
        so_far({"measured": number})
    if "call" in spec:
        globals()[spec["call"]](spec)
    time.sleep(spec.get("seconds", 0))
    return {"measured": 3}


def sleep(spec):
    time.sleep(spec.get("seconds", 60))
    return {}


def tell(spec, *pids):
    """Writes spec's file of process ids, which is there whole or not at all."""
    with open(spec["pids"] + ".new", "w") as file:
        file.write(" ".join(map(str, pids)))
    os.replace(spec["pids"] + ".new", spec["pids"])


def lasting_grandchild(spec):
    """Ignores SIGTERM and starts a process in a session of its own that ignores it too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    grandchild = subprocess.Popen([sys.executable, "-c", ignore], start_new_session=True)
    tell(spec, os.getpid(), grandchild.pid)
    time.sleep(spec.get("seconds", 60))
    return {}


def sleeping_grandchild(spec):
    """Starts a process in a session of its own that does not inherit the environment."""
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    grandchild = subprocess.Popen(sleep, start_new_session=True, env=spec["environment"])
    tell(spec, grandchild.pid)
    time.sleep(60)


def segfault(spec):
    import ctypes

    ctypes.string_at(0)


def kill_itself(spec):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def leave_early(spec):
    os._exit(spec["code"])


def value_error(spec):
    error = ValueError("seven is not a colour")
    error.add_note("in step 3")
    raise error


def torch_allocation(spec):
    import torch

    torch.empty(2**60, dtype=torch.uint8)


def address_space(spec):
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    bytearray(2**31)


def wrapped_out_of_memory(spec):
    try:
        raise MemoryError("too much")
    except MemoryError as error:
        raise RuntimeError("the compiler failed") from error


def no_json(spec):
    return {"a set": {1, 2}}


def a_parent_that_dies(spec):
    """Runs a trial of its own and is killed in the middle."""
    import threading

    from whyhung.process.trial import run_child

    run = threading.Thread(
        target=run_child,
        args=(f"trial_entries:{spec['entry']}", spec),
        kwargs={"deadline_s": 60},
    )
    run.start()
    while not os.path.exists(spec["pids"]):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def a_trial_of_its_own(spec):
    from whyhung.process.trial import run_child

    run_child(spec["entry"], spec, deadline_s=60)
    return {}


def sleep_and_tell(spec):
    tell(spec, os.getpid())
    time.sleep(60)


def declining(spec):
    return {"declined": "not for such cells"}


def ending(spec):
    """Return one of the above by name."""
    return globals()[spec["how"]](spec)


def greet(spec):
    return {"rank": int(os.environ["RANK"]), "of": int(os.environ["WORLD_SIZE"]), **spec}


def end_as_told(spec):
    """One rank ends as spec says; the others sleep, as in a collective."""
    mine = spec.get(os.environ["RANK"])
    standing("work")
    if mine == "raise":
        raise ValueError("the planted mistake")
    if mine == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mine == "leave":
        os._exit(7)
    time.sleep(spec["others_s"])
    return {}
