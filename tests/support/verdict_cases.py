"""Evidence by hand for every rule of a verdict, for every near miss, and what each is called.

Of one rank, and of two: which one is to blame, and when none is.
"""

from dataclasses import replace

from evidences import SPIN, STEPS, TRAIN, frozen, looks, moving, oracle, p, resting, returned, trial

from nsa.lab.watch.evidence import End, P, Sample

MAIN_WAITS = {"name": "MainThread", "main": True, "active": False, "gil": False,
              "frames": ["train.py:1 main"]}  # fmt: skip
LOCK = [f"{TRAIN}:40 take", f"{TRAIN}:12 fetch"]
AT_LOCK = {"cpu": 0.0, "state": "S", "wchan": "futex_wait_queue"}
ASLEEP = {"cpu": 0.0, "state": "S", "wchan": "hrtimer_nanosleep"}
PIPE = {"cpu": 0.0, "state": "S", "wchan": "pipe_read"}
SOCKET = {"cpu": 0.0, "state": "S", "wchan": "sk_wait_data"}
IDLE_LOOKS = {"frames": LOCK, "gil": False, "active": False}
NATIVE = {"frames": SPIN, "gil": False, "active": True}


def cases(groups):
    """{name: (evidence, verdict)} of {verdict: {name: evidence}}."""
    return {
        name: (evidence, verdict)
        for verdict, group in groups.items()
        for name, evidence in group.items()
    }


def ended(*how, seconds=2, looked=(), **more):
    return trial(moving(seconds), looked, end=End(*how), **more)


def segfault(**how):
    return ended("signal", -11, "SIGSEGV", **how)


def dumped(**how):
    """One look by faulthandler, which ends a process that it finds unwell."""
    return {"looked": looks(1.5, tool="faulthandler", count=1), **how}


def asked(**oracles):
    return returned(oracles=oracles)


def debugged(level):
    return {"environment": {"env": {"TORCH_DISTRIBUTED_DEBUG": level}}}


BUSY = {"preflight": ["process 7 has 3 GiB of the GPU"]}
RECOMPILED = oracle(False, "recompile")
NOT_FINITE = oracle(False, "nan-grad")

ENDED = cases({
    "PASS": {
        "all steps done": returned(),
        "all steps done, all oracles hold": asked(finite=oracle()),
        "an oracle that cannot tell": asked(graph=oracle(None)),
        "late, and done": returned(soft_s=1.0),
    },
    "INCONCLUSIVE:preflight": {
        "a foreign process": returned(**BUSY),
        "a crash among foreign processes": segfault(**BUSY),
    },
    "OOM:device": {
        "device memory": trial(
            moving(2), end=End("exception", 1, "OutOfMemoryError", "CUDA out of memory",
                               out_of_memory="device", peak_mib=80_000.0)),
    },
    "OOM:host": {
        "the kernel took it":
            trial(moving(2), end=End("signal", -9, "SIGKILL", "killed", out_of_memory="host")),
    },
    "CRASH:SIGKILL": {"somebody took it": ended("signal", -9, "SIGKILL")},
    "CRASH:KeyError": {"an exception": ended("exception", 1, "KeyError", "'x'")},
    "CRASH:exit 0": {"an early exit": ended("exit", 0, "", "exited with 0")},
    "CRASH:early-return": {"an early return": ended("returned", 0, losses=[1.0, 1.0])},
    "INCONCLUSIVE:tool-crash": {
        "a debug mode that crashes": segfault(**debugged("DETAIL")),
        "faulthandler ended it": segfault(**dumped()),
    },
    "CRASH:SIGSEGV": {
        "the same signal without it": segfault(**debugged("INFO")),
        "faulthandler had been gone for long": segfault(**dumped(seconds=9)),
        "only py-spy had looked": segfault(looked=looks(1.5, count=1)),
    },
    "CRASH:SIGABRT": {"another signal than a dump's": ended("signal", -6, "SIGABRT", **dumped())},
    "INCONCLUSIVE:stopped-early": {
        "its caller stopped it": ended("stopped by the supervisor", -15, "caller", seconds=9),
    },
    "FAIL:nan-loss": {
        "a loss that is no number": returned(losses=[1.0, float("nan")] + [1.0] * (STEPS - 2)),
    },
    "FAIL:nan-grad": {
        "a broken oracle": asked(finite=oracle(False, "nan-grad", place="head.weight")),
        "compiled in each step, and wrong": asked(recompilations=RECOMPILED, finite=NOT_FINITE),
    },
    "FAIL:mine": {"a stranger's oracle": asked(mine={"ok": False, "detail": "no"})},
    "FAIL:cycle": {
        "a leak whose graph explains it":
            asked(memory=oracle(False, "host-leak"), census=oracle(False, "cycle")),
    },
    "SLOW:recompile": {"compiled in each step": asked(recompilations=RECOMPILED)},
})  # fmt: skip

ALIVE = cases({
    "SLOW": {
        "slow at 100 % of a core, its stacks alike": trial(moving(20), looks(18)),
        "slow, and its last samples rest for 4 s": frozen(4.0, looks(4, **NATIVE)),
        "still running and late": trial(moving(9), end=None),
    },
    "INCONCLUSIVE:running": {"still running and not late": trial(moving(4), end=None)},
    "INCONCLUSIVE:no-heartbeat": {
        "nothing was ever heard":
            trial([Sample(t, 0, P(), 0, t, "R") for t in range(20)], began_s=None),
        "no sample at all": trial(),
    },
    "INCONCLUSIVE:too-short": {
        "too short to see it move": trial(resting(0, 2, at=P())),
    },
})  # fmt: skip

PROVEN = cases({
    "HANG:python-spin": {
        "a loop in Python": frozen(8, looks(9)),
        "a loop over two lines":
            frozen(8, looks(9, each=[SPIN, [f"{TRAIN}:32 never_ends", *SPIN[1:]], SPIN])),
        "a loop in a thread that is not the main one":
            frozen(8, [replace(look, threads=[{**look.threads[1], "main": False}, MAIN_WAITS])
                       for look in looks(9)]),
        "at rest as its process ends": frozen(8, looks(9), end=None, before_s=3.0),
    },
    "HANG:gil-held": {
        "the GIL is held at work": frozen(8, looks(9), beats=False),
        "the GIL is held asleep": frozen(8, beats=False, **ASLEEP),
    },
    "HANG:stopped": {"stopped": frozen(8, cpu=0.0, beats=False, state="T")},
    "HANG:blocked": {
        "a lock": frozen(8, looks(9, **IDLE_LOOKS), **AT_LOCK),
        "a lock, where nobody may look": frozen(8, **AT_LOCK),
        "a lock, told by native frames":
            frozen(8, [*looks(9, **IDLE_LOOKS),
                       *looks(10.9, frames=["libc:0 __futex_abstimed_wait"], tool="native",
                              count=1)],
                   cpu=0.0, state="S"),
        "a lock, told by faulthandler and the kernel":
            frozen(8, looks(9, frames=LOCK, gil=None, active=None, tool="faulthandler"), **AT_LOCK),
        "a queue whose frames tell":
            frozen(8, looks(9, frames=["/usr/lib/python3.11/queue.py:171 get", *LOCK], gil=False),
                   cpu=0.0, state="S"),
        "a sleep of an hour": frozen(11, looks(12, **IDLE_LOOKS), **ASLEEP),
        "a pipe that stays empty": frozen(11, looks(12, **IDLE_LOOKS), **PIPE),
    },
})  # fmt: skip

NEAR = cases({
    "SLOW": {
        "identical stacks, but P moves": trial([*moving(20)], looks(17, at=p(16, fired=151))),
        "P moved after the looks":
            trial([*moving(3), *resting(3, 8), *resting(11.25, 1, at=p(fired=5))], looks(9)),
        "a lock for 4 s": frozen(4, looks(4, **IDLE_LOOKS), **AT_LOCK),
        "it has rested as long before":
            trial([*moving(2), *resting(2, 3, at=p(2, fired=9)), *resting(5.25, 6)], looks(9.5)),
        "one line owns the GIL for 4 s": frozen(4, looks(5)),
    },
    "INCONCLUSIVE:unproven": {
        "two looks only": frozen(8, looks(9, count=2)),
        "three looks at one moment": frozen(8, looks(10, apart_s=0.1)),
        "another function at each look":
            frozen(8, looks(9, each=[SPIN, [f"{TRAIN}:60 other", *SPIN[1:]], SPIN])),
        "a native call that let the GIL go": frozen(8, looks(9, **NATIVE)),
        "at work, and no py-spy":
            frozen(8, looks(9, gil=None, active=None, tool="faulthandler")),
        "stopped for a look only":
            trial([*moving(3), *resting(3, 7), *resting(10, 0.25, state="t")]),
        "continued in between":
            trial([*moving(3), *resting(3, 4, state="T", cpu=0), *resting(7.25, 3, state="R")],
                  looks(9, **NATIVE)),
        "no beat as it reads from a disk": frozen(8, beats=False, cpu=0.0, state="D"),
        "no beat, and no core to beat on":
            frozen(8, looks(9), beats=False, cpu=0.0, state="R"),
        "one line, and no core to go on with": frozen(8, looks(9), cpu=0.02),
        "one beat":
            trial([*moving(3), *resting(3, 4, beats=False), *resting(7.25, 4, beats=True)],
                  looks(9, **NATIVE)),
        "a lock, and a thread at work":
            frozen(8, looks(9, **IDLE_LOOKS), **{**AT_LOCK, "cpu": 0.5}),
        "a lock, and a device at work": frozen(8, looks(9, **IDLE_LOOKS), **AT_LOCK, gpu=100.0),
        "a sleep of 8 s": frozen(8, looks(9, **IDLE_LOOKS), **ASLEEP),
        "a network that does not answer": frozen(30, looks(30, **IDLE_LOOKS), **SOCKET),
        "idle, and nothing tells at what":
            frozen(30, looks(30, **IDLE_LOOKS), cpu=0.0, state="S"),
        "a first step that compiles":
            trial([*moving(1), *resting(1, 8, at=p(0, "forward"))], looks(7, at=p(0, "forward"))),
        "a step is predicted to take longer": frozen(8, looks(9), predicted_s=60.0),
    },
})  # fmt: skip

ALONE = {**ENDED, **ALIVE, **PROVEN, **NEAR}

RERUNS = cases({
    "HANG:unproven-native": {"rests at the same P": frozen(20, looks(12, **NATIVE))},
    "SLOW": {
        "comes further and rests again":
            trial([*moving(5), *resting(5, 30, at=p(4))], looks(30, at=p(4), **NATIVE)),
        "comes further and moves": trial(moving(40)),
    },
    "INCONCLUSIVE:unproven": {
        "rests earlier":
            trial([*moving(3), *resting(3, 30, at=p(2))], looks(30, at=p(2), **NATIVE)),
        "is stopped": ended("stopped by the supervisor", -15, "caller"),
    },
    "PASS": {"returns": returned()},
    "FAIL:nan-grad": {"returns, and an oracle is broken": asked(finite=NOT_FINITE)},
    "CRASH:SIGSEGV": {"crashes": segfault(seconds=4)},
    "HANG:python-spin": {"is proven": frozen(20, looks(12))},
    "INCONCLUSIVE:preflight": {"cannot be trusted": returned(preflight=["another process"])},
})  # fmt: skip

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
