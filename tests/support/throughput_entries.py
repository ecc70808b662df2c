"""A stand-in for `child.measure_rank` of throughput that tests run in ranks."""

import os
import time
from dataclasses import asdict

from workbook.rooms.throughput.trials import Measured


def ending(spec):
    """The last rank fails where the cell has a seed; the others do what ranks do meanwhile."""
    seed, rank = spec["cell"]["seed"], int(os.environ["RANK"])
    last = rank == spec["cell"]["ranks"] - 1
    if seed and last:
        raise MemoryError("planted")
    if not last:
        time.sleep(60 if seed else 0.1)
    speed = {"step_ms": 10.0 * (rank + 1), "tokens_s": 1000.0 / (rank + 1)}
    return asdict(Measured(**speed, losses=[rank, 3.0]))
