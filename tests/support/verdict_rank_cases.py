"""Evidence by hand of two ranks: which one is to blame, and when none is."""

from evidences import TRAIN, looks, moving, p, resting, trial
from verdict_cases import ASLEEP, AT_LOCK, NATIVE, SOCKET, cases

REDUCE = [f"{TRAIN}:50 averaged", f"{TRAIN}:9 step"]


def flight(*entries):
    return [{"seq": n, "op": op, "group": "0", "sizes": [[4]], "state": "scheduled", "frames": []}
            for n, op in entries]  # fmt: skip


def two(rank0, rank1, looked=(), **more):
    samples = [*moving(3.0), *moving(3.0, rank=1), *rank0, *rank1]
    evidence = trial(samples, looked, **more)
    evidence.spec["ranks"] = 2
    return evidence


def waiting(rank, seconds=8.0, **how):
    return resting(3.0, seconds, rank=rank, **{**AT_LOCK, **how})


FLIGHTS = {0: flight((1, "all_reduce"), (2, "all_reduce")), 1: flight((1, "all_reduce"))}

RANKS = {
    "one spins and the others wait": (
        two(waiting(0), resting(3, 8, rank=1), looked=looks(9, rank=1)),
        "HANG:python-spin", 1,
    ),
    "one spins and the others go on": (
        two(moving(11)[12:], resting(3, 8, rank=1), looked=looks(9, rank=1)),
        "HANG:python-spin", 1,
    ),
    "one leaves out a collective": (
        two(waiting(0, 11), resting(3, 11, rank=1, **SOCKET), flights=FLIGHTS),
        "HANG:collective", 1,
    ),
    "one leaves out a collective, and the other spins until its device is done with it": (
        two(resting(3, 11, gpu=100.0, at=p(step=4, phase="data")),
            resting(3, 11, rank=1, gpu=100.0, **SOCKET), flights=FLIGHTS),
        "HANG:collective", 1,
    ),
    "one leaves out a collective, told by the counts alone": (
        two(waiting(0, 11, at=p(collectives=9)),
            resting(3, 11, rank=1, at=p(collectives=8), **SOCKET)),
        "HANG:collective", 1,
    ),
    "one brings another collective": (
        two(waiting(0), waiting(1),
            flights={0: flight((2, "all_reduce")), 1: flight((2, "all_gather"))}),
        "HANG:collective", 0,
    ),
    "all wait, in the same collective": (
        two(waiting(0), waiting(1), flights={0: FLIGHTS[0], 1: FLIGHTS[0]}), "HANG:blocked", 0,
    ),
    "one waits for a lock of its own": (
        two(waiting(0, wchan=""), waiting(1, at=p(fired=2)),
            looked=looks(9, frames=["x/torch/distributed/distributed_c10d.py:9 wait", *REDUCE],
                         gil=False)),
        "HANG:blocked", 1,
    ),
}  # fmt: skip

RANKS_NEAR = cases({
    "SLOW": {"one waits and the other moves": two(waiting(0), moving(11, rank=1)[12:])},
    "INCONCLUSIVE:unproven": {
        "one is behind, at work in native code":
            two(waiting(0), resting(3, 8, rank=1), looks(9, rank=1, **NATIVE), flights=FLIGHTS),
        "one is behind and waits for its data, not yet for long":
            two(waiting(0), resting(3, 8, rank=1, **SOCKET), flights=FLIGHTS),
        "one waits for a network": two(waiting(0), resting(3, 8, rank=1, **SOCKET)),
        "one sleeps, not yet for long": two(waiting(0), resting(3, 8, rank=1, **ASLEEP)),
    },
})  # fmt: skip
