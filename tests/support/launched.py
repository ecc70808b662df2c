"""What the ranks of test_ranks.py do."""

import os
import signal
import time

from nsa.lab.process.rank_child import standing


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
