"""Evidence by hand for every rule of a verdict, for every near miss, and what each is called.

Of one rank, and of two: which one is to blame, and when none is.
"""

from evidences import (
    SPIN,
    STEPS,
    TRAIN,
    frozen,
    moving,
    oracle,
    p,
    process,
    resting,
    returned,
    snapshots,
    thread,
    trial,
)

from whyhung.watch.evidence import End, P, Process, Sample, Thread, Wait


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
    "INCONCLUSIVE:tool-crash": {"a debug mode that crashes": segfault(**debugged("DETAIL"))},
    "CRASH:SIGSEGV": {"the same signal without it": segfault(**debugged("INFO"))},
    "CRASH:SIGABRT": {"an abort": ended("signal", -6, "SIGABRT")},
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
        "slow at 100 % of a core, its stacks alike": trial(moving(20), snapshots(16, process())),
        "slow, and its last samples rest for 4 s": frozen(4.0, snapshots(4, process())),
        "still running and late": trial(moving(9), end=None),
    },
    "INCONCLUSIVE:running": {"still running and not late": trial(moving(4), end=None)},
    "INCONCLUSIVE:no-heartbeat": {
        "nothing was ever heard":
            trial([Sample(t, 0, P(), 0, t, "R") for t in range(20)], began_s=None),
        "no sample at all": trial(),
    },
    "INCONCLUSIVE:too-short": {"too short to see it move": trial(resting(0, 2, at=P()))},
})  # fmt: skip

OTHERS = ((1, 0),)  # any other thread of process 1
LOCKED = ("lock", "waits for a lock", OTHERS)
LOCK_OF_2 = ("lock", "waits for a lock that thread 2 holds", ((1, 2),))
LOCK_OF_1 = ("lock", "waits for a lock that thread 1 holds", ((1, 1),))
PIPE_OF_1 = ("pipe", "reads a pipe that process 1 writes", ((1, 0),))
PIPE_OF_7 = ("pipe", "reads a pipe that process 7 writes", ((7, 0),))
SOCKET = Wait("socket", "reads a socket of 10.0.0.7:443", outside=True)
ASLEEP = [Wait("timer", "sleeps", left_s=9.0 - n) for n in range(4)]
CHILD = ("child", "waits for process 7 to end", ((7, 0),))
HELD = {
    1: [
        {"tid": 1, "holders": [2], "sure": True, "what": "Lock", "name": "self.lock"},
        {"tid": 2, "holders": [1], "sure": True, "what": "Lock", "name": "other"},
    ]
}
QUIET = {"cpu": 0.0, "state": "S"}
REDUCE = ("/x/torch/distributed/distributed_c10d.py:9 all_reduce", f"{TRAIN}:50 averaged")


def still(*seen, seconds=18.0, **more):
    """Trains for 3 s and then rests, with `seen` processes at every look."""
    how = {**QUIET, **{name: more.pop(name) for name in ("cpu", "state", "beats", "gpu", "at")
                       if name in more}}  # fmt: skip
    looked = {name: more.pop(name) for name in ("each", "count", "each_cpu_s", "apart_s")
              if name in more}  # fmt: skip
    looked = snapshots(8.5, *seen, at=how.get("at"), **looked)
    return frozen(seconds, looked, **how, **more)


def worker(wait, pid=7, **more):
    frames = more.pop("frames", [f"{TRAIN}:60 load"])
    return process(thread(pid, wait=wait, frames=frames), pid=pid, rank=None, of=0, **more)


def housekeeper(tid=9):
    frames = ["/x/site-packages/tqdm/_monitor.py:60 run"]
    return thread(tid, main=False, wait=Wait("lock", "waits", OTHERS, left_s=10.0), frames=frames)


def sleeping(left_s, text="sleeps"):
    return process(thread(wait=Wait("timer", text, left_s=left_s)))


def spinning(**more):
    return process(thread(visible="same", **more))


TAKES_GIL = thread(wait=Wait("lock", "waits for a futex", OTHERS, left_s=0.005), gil=False)

BY_CALLER = End("stopped by the supervisor", -15, "caller")

CERTIFIED = cases({
    "HANG:lock": {
        "the only thread waits for a lock": still(process(thread(wait=LOCKED))),
        "a lock that it holds itself": still(process(thread(wait=LOCK_OF_1))),
        "two threads hold each other's":
            still(process(thread(wait=LOCK_OF_2), thread(2, main=False, wait=LOCK_OF_1))),
        "all its threads wait for locks":
            still(process(thread(wait=LOCKED), thread(2, main=False, wait=LOCKED))),
        "its own thread beats, and can do nothing":
            still(process(thread(wait=LOCKED), thread(2, main=False, ours=True, state="R"))),
        "a library's monitor wakes now and then":
            still(process(thread(wait=LOCKED), housekeeper())),
        "the owners are known, and another thread works":
            still(process(thread(wait=LOCKED), thread(2, main=False, wait=LOCKED),
                          thread(3, main=False)), locks=HELD),
        "its caller stopped it when that was certain":
            still(process(thread(wait=LOCKED)),
                  end=BY_CALLER),
        "it still runs, and was looked at long enough":
            still(process(thread(wait=LOCKED)), end=None, seconds=9.0),
    },
    "HANG:pipe": {
        "it alone holds the other end": still(process(thread(wait=PIPE_OF_1))),
        "a worker waits for it, and it for the worker":
            still(process(thread(wait=PIPE_OF_7)), worker(PIPE_OF_1)),
    },
    "HANG:child": {
        "a child that waits for it": still(process(thread(wait=CHILD)), worker(PIPE_OF_1)),
    },
    "HANG:ended": {
        "a worker that has ended": still(process(thread(wait=PIPE_OF_7)), worker(None, state="Z")),
    },
    "HANG:GIL": {
        "who holds the GIL waits for who wants it":
            still(process(TAKES_GIL, thread(2, main=False, wait=LOCK_OF_1, gil=True))),
    },
    "HANG:loop": {
        "a loop whose variables stay": still(spinning(), cpu=1.0, state="R", each_cpu_s=1.5),
    },
})  # fmt: skip

NEAR = cases({
    "INCONCLUSIVE:stopped-early": {
        "its caller stopped it while it stalled":
            still(process(thread(wait=SOCKET)), seconds=40.0, end=BY_CALLER),
    },
    "SLOW": {
        "identical stacks, but it moves": trial([*moving(20)], snapshots(17, process())),
        "it moved after the looks":
            trial([*moving(3), *resting(3, 8), *resting(11.25, 1, at=p(fired=5))],
                  snapshots(7, process(thread(wait=LOCKED)))),
        "a lock for 4 s": still(process(thread(wait=LOCKED)), seconds=4.0),
    },
    "SLOW:uncounted": {
        "computes": still(process(), cpu=1.0, state="R", each_cpu_s=0.9),
        "computes, in a loop whose variables change":
            still(each=[[process(thread(visible=str(n)))] for n in range(4)],
                  cpu=1.0, each_cpu_s=1.5),
        "a closed loop that had no processor yet": still(spinning(), each_cpu_s=0.1),
        "one call of C, for long":
            still(each=[[process(thread(visible="~"))] for n in range(8)], cpu=1.0, state="R",
                  each_cpu_s=1.5),
        "a native call that keeps the GIL":
            still(process(thread(gil=True)), cpu=1.0, beats=False, each_cpu_s=0.9),
        "its worker computes": still(process(thread(wait=PIPE_OF_7)), worker(None),
                                     each_cpu_s=0.2),
        "another thread computes":
            still(process(thread(wait=LOCKED), thread(2, main=False)), each_cpu_s=0.5),
        "it wants a processor, and gets none": still(process(thread(state="R"))),
        "a GPU works, and it waits for that":
            still(process(thread(frames=["/x/torch/cuda/streams.py:9 synchronize", *SPIN])),
                  gpu=100.0),
        "it asks again and again, and its variables change":
            still(each=[[process(thread(wait=Wait("timer", "sleeps", left_s=0.9), visible=str(n)))]
                        for n in range(4)]),
    },
    "STALLED:lock": {
        "something outside may reach another thread":
            still(process(thread(wait=LOCKED), thread(2, main=False, wait=SOCKET))),
        "at every look the same, and yet it goes on in between":
            still(each=[[process(thread(wait=LOCKED, switches=100 * n))] for n in range(4)]),
        "who should wake it was not seen":
            still(process(thread(wait=("lock", "waits for thread 5's lock", ((1, 5),))))),
    },
    "SLOW:timer": {
        "a sleep of 15 s": still(each=[[sleeping(15.0 - n)] for n in range(4)]),
        "its worker sleeps":
            still(each=[[process(thread(wait=PIPE_OF_7)),
                         worker(Wait("timer", "sleeps", left_s=15.0 - n))] for n in range(4)]),
        "a lock that a timer of another thread may bring":
            still(each=[[process(thread(wait=LOCKED),
                                 thread(2, main=False, wait=Wait("timer", "", left_s=9.0 - n)))]
                        for n in range(4)]),
    },
    "STALLED:stopped": {
        "stopped": still(process(thread(wait=("stopped", "is stopped"), state="T"), state="T")),
        "its worker is stopped":
            still(process(thread(wait=PIPE_OF_7)), worker(("stopped", "is stopped"), state="T")),
    },
    "STALLED:socket": {
        "another host": still(process(thread(wait=SOCKET))),
        "its worker waits for another host": still(process(thread(wait=PIPE_OF_7)), worker(SOCKET)),
    },
    "STALLED:file lock": {
        "somebody else's": still(process(thread(wait=Wait("file lock", "held", outside=True)))),
    },
    "STALLED:timer": {"a sleep of days": still(each=[[sleeping(1e6 - n)] for n in range(4)])},
    "STALLED:polling": {"it looks for something twice a second": still(sleeping(0.5))},
    "STALLED:loop": {
        "a loop that asks for what nobody changes":
            still(each=[[process(thread(visible="~", frames=[f"{TRAIN}:{31 + n % 2} never_ends"]))]
                        for n in range(8)], cpu=1.0, state="R", each_cpu_s=1.5),
    },
    "STALLED:device": {
        "a GPU that does nothing":
            still(process(thread(frames=["/x/torch/cuda/streams.py:9 synchronize", *SPIN])),
                  cpu=1.0, gpu=0.0, each_cpu_s=0.9),
    },
    "STALLED:other": {"nobody may look": still(process(thread(state="S", frames=())))},
    "INCONCLUSIVE:few-looks": {
        "two looks only": still(process(thread(wait=LOCKED)), count=2),
        "another host, for 12 s": still(process(thread(wait=SOCKET)), seconds=12.0),
        "nobody looked": still(count=0),
    },
})  # fmt: skip

ALONE = {**ENDED, **ALIVE, **CERTIFIED, **NEAR}


def flight(*entries):
    return [{"seq": n, "op": op, "group": "0", "sizes": [[size]], "state": "scheduled",
             "frames": [f"{TRAIN}:{n} step"]} for n, op, size in entries]  # fmt: skip


def rank(number, wait, frames=REDUCE, **more):
    pid = number + 1
    waits = wait if isinstance(wait, Wait) or wait is None else (*wait[:2], ((pid, 0),))
    return process(thread(pid, wait=waits, frames=frames), pid=pid, rank=number, **more)


def two(*seen, seconds=18.0, moves=(), each=None, **more):
    samples = [*moving(3.0), *moving(3.0, rank=1)]
    for number in range(2):
        samples += (
            [s for s in moving(3.0 + seconds, rank=number) if s.t > 3] if number in moves
            else resting(3.0, seconds, rank=number, **QUIET)
        )  # fmt: skip
    evidence = trial(samples, snapshots(8.5, *seen, each=each), **more)
    evidence.spec["ranks"] = 2
    return evidence


AHEAD = flight((1, "gloo:all_reduce", 4), (2, "gloo:all_reduce", 4))
BEHIND = flight((1, "gloo:all_reduce", 4))
OWN = [f"{TRAIN}:90 upload"]
RECEIVE = ("/x/torch/distributed/distributed_c10d.py:9 recv", f"{TRAIN}:70 exchange")
SEND = ("/x/torch/distributed/distributed_c10d.py:9 send", f"{TRAIN}:70 exchange")

BACKWARD = ("/x/torch/autograd/graph.py:9 _engine_run_backward", f"{TRAIN}:50 averaged")
AVERAGING = process(
    thread(wait=LOCKED, frames=BACKWARD),
    Thread(8, "pt_gloo_runloop", state="S", wait=Wait("lock", "waits", OTHERS, left_s=1784.0)),
    Thread(9, "gloo_tcp_loop", state="R", wait=None),
)

RANKS = {
    "one averages its gradients, told by gloo's thread alone": (
        two(AVERAGING, rank(1, SOCKET, OWN)), "STALLED:socket", "rank 1", "train.py:90 upload",
    ),
    "one has ended, and nothing tells whether it was in the group": (
        two(rank(0, ("lock", "waits", ((1, 0),))), Process(2, of=1, rank=1, state="X")),
        "STALLED:collective", "rank 0", "train.py:50 averaged",
    ),
    "one is stuck in a lock of its own": (
        two(rank(0, LOCKED), rank(1, LOCKED, OWN), flights={0: AHEAD, 1: BEHIND}),
        "HANG:lock", "rank 1", "train.py:90 upload",
    ),
    "the same, told by the stacks alone": (
        two(rank(0, LOCKED), rank(1, LOCKED, OWN)), "HANG:lock", "rank 1", "train.py:90 upload",
    ),
    "one has ended": (
        two(rank(0, LOCKED), Process(2, of=1, rank=1, state="X"), flights={0: AHEAD, 1: BEHIND}),
        "HANG:collective", "rank 1", "train.py:50 averaged",
    ),
    "other sizes": (
        two(rank(0, LOCKED), rank(1, LOCKED),
            flights={0: AHEAD, 1: [*BEHIND, *flight((2, "gloo:all_reduce", 5))]}),
        "HANG:collective", "rank 0", "train.py:50 averaged",
    ),
    "one uploads, and the other waits for it": (
        two(rank(0, LOCKED), rank(1, SOCKET, OWN), flights={0: AHEAD, 1: BEHIND}),
        "STALLED:socket", "rank 1", "train.py:90 upload",
    ),
    "one sleeps, and the other waits for it": (
        two(each=[[rank(0, LOCKED), rank(1, wait, OWN)] for wait in ASLEEP],
            flights={0: AHEAD, 1: BEHIND}),
        "SLOW:timer", "rank 1", "train.py:90 upload",
    ),
    "one computes, and the other waits for it": (
        two(rank(0, LOCKED), rank(1, None, OWN), flights={0: AHEAD, 1: BEHIND}),
        "SLOW:uncounted", "rank 1", "train.py:90 upload",
    ),
    "both in one collective, which the network may still end": (
        two(rank(0, LOCKED), rank(1, LOCKED), flights={0: AHEAD, 1: AHEAD}),
        "STALLED:collective", "rank 0", "train.py:50 averaged",
    ),
    "both receive, and nobody sends": (
        two(rank(0, LOCKED, RECEIVE), rank(1, LOCKED, RECEIVE)),
        "HANG:collective", "rank 1", "train.py:70 exchange",
    ),
    "one sends and the other receives, which takes long the first time": (
        two(rank(0, LOCKED, SEND), rank(1, LOCKED, RECEIVE)),
        "STALLED:collective", "rank 0", "train.py:70 exchange",
    ),
    "both receive, and a record says that a collective has not ended": (
        two(rank(0, LOCKED, RECEIVE), rank(1, LOCKED, RECEIVE), flights={0: AHEAD, 1: AHEAD}),
        "HANG:collective", "rank 1", "train.py:70 exchange",
    ),
    "both receive, and a thread of one may send": (
        two(rank(0, LOCKED, RECEIVE), process(
            thread(2, wait=("lock", "waits", ((2, 0),)), frames=RECEIVE),
            thread(8, main=False, wait=SOCKET, frames=OWN), pid=2, rank=1)),
        "STALLED:collective", "rank 1", "train.py:70 exchange",
    ),
    "one is stopped": (
        two(rank(0, LOCKED), rank(1, ("stopped", "is stopped"), OWN, state="T"),
            flights={0: AHEAD, 1: BEHIND}),
        "STALLED:stopped", "rank 1", "train.py:90 upload",
    ),
}  # fmt: skip
