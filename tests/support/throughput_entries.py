"""Stand-ins for `throughput_trial.measure_rank` that tests run in child processes: every ending."""

import os
import time


def ending(spec):
    """Ends as the cell's seed says, in the last rank; the others do what ranks do."""
    seed, rank = spec["cell"]["seed"], int(os.environ.get("RANK", 0))
    last = rank == spec["cell"]["ranks"] - 1
    if seed == 1 and last:
        raise MemoryError("planted")
    if seed == 2 and last:
        raise RuntimeError("planted")
    if seed == 3:
        time.sleep(60)
    if seed == 4:
        return {"declined": "planted"}
    if not last:
        time.sleep(0.1 if seed == 0 else 60)
    return measured(step_ms=10.0 * (rank + 1), tokens_s=1000.0 / (rank + 1), losses=[rank, 3.0])


def measured(**changes):
    """What a rank returns."""
    names = ("step_ms", "step_ms_q20", "step_ms_q80", "tokens_s", "recount_tokens_s", "peak_mib")
    return {
        **dict.fromkeys(names, 1.0),
        **{"loader_wait_ms": 0.0, "recompilations": 0, "syncs": None, "phase_ms": {"data": 1.0}},
        **{"losses": [5.0, 4.0], "device_mib": [], "host_mib": [], "paths": {}},
        **changes,
    }
