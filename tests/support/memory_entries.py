"""Stand-in cells that test_memory_cells.py runs in child processes: no model, every ending."""

import os
import time


def fake_cell(spec):
    """Ends as the cell's `seed` says, and writes a line to the log named in NSA_TEST_LOG."""
    seed = spec["cell"]["seed"]
    started = time.time()
    if seed == 1:
        raise MemoryError("planted")
    if seed == 2:
        time.sleep(60)
    if seed == 3:
        os.abort()
    if seed == 4:
        raise ValueError("planted")
    if seed == 5:  # fails only beside others
        log = os.environ["NSA_TEST_LOG"]
        beside = os.path.exists(log)
        with open(log, "a") as file:
            file.write(f"{started}\n")
        if not beside:
            raise MemoryError("crowded")
    sizes = dict.fromkeys(("peak", "data", "forward", "backward", "optimizer"), 0.0)
    measured = {f"{name}_mib": 7.0 for name in sizes}
    return measured | {"step_ms": 3.0, "by_category_mib": {"activations": 5.0}, "parameters": 11}
