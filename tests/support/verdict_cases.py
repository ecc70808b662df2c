"""Evidence by hand for every rule of a verdict, for every near miss, and what each is called."""

from dataclasses import replace

from evidences import (
    SPIN,
    STEPS,
    STOPPED,
    TRAIN,
    frozen,
    looks,
    moving,
    oracle,
    p,
    resting,
    returned,
    trial,
)

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
ENDED = {
    "all steps done": (returned(), "PASS"),
    "all steps done, all oracles hold": (returned(oracles={"finite": oracle()}), "PASS"),
    "an oracle that cannot tell": (returned(oracles={"graph": oracle(None)}), "PASS"),
    "late, and done": (returned(soft_s=1.0), "PASS"),
    "a foreign process": (
        returned(preflight=["process 7 has 3 GiB of the GPU"]),
        "INCONCLUSIVE:preflight",
    ),
    "a crash among foreign processes": (
        trial(moving(2), end=End("signal", -11, "SIGSEGV"), preflight=["process 7 is on the GPU"]),
        "INCONCLUSIVE:preflight",
    ),
    "device memory": (
        trial(moving(2), end=End("exception", 1, "OutOfMemoryError", "CUDA out of memory",
                                 out_of_memory="device", peak_mib=80_000.0)),
        "OOM:device",
    ),
    "the kernel took it": (
        trial(moving(2), end=End("signal", -9, "SIGKILL", "killed", out_of_memory="host")),
        "OOM:host",
    ),
    "somebody took it": (trial(moving(2), end=End("signal", -9, "SIGKILL")), "CRASH:SIGKILL"),
    "an exception": (
        trial(moving(2), end=End("exception", 1, "KeyError", "'x'")), "CRASH:KeyError"
    ),
    "an early exit": (trial(moving(2), end=End("exit", 0, "", "exited with 0")), "CRASH:exit 0"),
    "an early return": (
        trial(moving(2), end=End("returned", 0), losses=[1.0, 1.0]),
        "CRASH:early-return",
    ),
    "a debug mode that crashes": (
        trial(moving(2), end=End("signal", -11, "SIGSEGV"),
              environment={"env": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}),
        "INCONCLUSIVE:tool-crash",
    ),
    "the same signal without it": (
        trial(moving(2), end=End("signal", -11, "SIGSEGV"),
              environment={"env": {"TORCH_DISTRIBUTED_DEBUG": "INFO"}}),
        "CRASH:SIGSEGV",
    ),
    "faulthandler ended it": (
        trial(moving(2), looks(1.5, tool="faulthandler", count=1),
              end=End("signal", -11, "SIGSEGV")),
        "INCONCLUSIVE:tool-crash",
    ),
    "faulthandler had been gone for long": (
        trial(moving(9), looks(1.5, tool="faulthandler", count=1),
              end=End("signal", -11, "SIGSEGV")),
        "CRASH:SIGSEGV",
    ),
    "another signal than a dump's": (
        trial(moving(2), looks(1.5, tool="faulthandler", count=1),
              end=End("signal", -6, "SIGABRT")),
        "CRASH:SIGABRT",
    ),
    "only py-spy had looked": (
        trial(moving(2), looks(1.5, count=1), end=End("signal", -11, "SIGSEGV")),
        "CRASH:SIGSEGV",
    ),
    "its caller stopped it": (
        trial(moving(9), end=End("stopped by the supervisor", -15, "caller")),
        "INCONCLUSIVE:stopped-early",
    ),
    "a loss that is no number": (
        returned(losses=[1.0, float("nan")] + [1.0] * (STEPS - 2)),
        "FAIL:nan-loss",
    ),
    "a broken oracle": (
        returned(oracles={"finite": oracle(False, "nan-grad", place="head.weight")}),
        "FAIL:nan-grad",
    ),
    "a stranger's oracle": (returned(oracles={"mine": {"ok": False, "detail": "no"}}), "FAIL:mine"),
    "a leak whose graph explains it": (
        returned(oracles={"memory": oracle(False, "host-leak"), "census": oracle(False, "cycle")}),
        "FAIL:cycle",
    ),
    "compiled in each step": (
        returned(oracles={"recompilations": oracle(False, "recompile")}),
        "SLOW:recompile",
    ),
    "compiled in each step, and wrong": (
        returned(oracles={"recompilations": oracle(False, "recompile"),
                          "finite": oracle(False, "nan-grad")}),
        "FAIL:nan-grad",
    ),
}  # fmt: skip

ALIVE = {
    "slow at 100 % of a core, its stacks alike": (trial(moving(20), looks(18)), "SLOW"),
    "slow, and its last samples rest for 4 s": (frozen(4.0, looks(4, **NATIVE)), "SLOW"),
    "still running and not late": (trial(moving(4), end=None), "INCONCLUSIVE:running"),
    "still running and late": (trial(moving(9), end=None), "SLOW"),
    "nothing was ever heard": (
        trial([Sample(t, 0, P(), 0, t, "R") for t in range(20)], began_s=None),
        "INCONCLUSIVE:no-heartbeat",
    ),
    "no sample at all": (trial(), "INCONCLUSIVE:no-heartbeat"),
    "too short to see it move": (
        trial(resting(0, 2, at=P()), end=STOPPED),
        "INCONCLUSIVE:too-short",
    ),
}

PROVEN = {
    "a loop in Python": (frozen(8, looks(9)), "HANG:python-spin"),
    "a loop over two lines": (
        frozen(8, looks(9, each=[SPIN, [f"{TRAIN}:32 never_ends", *SPIN[1:]], SPIN])),
        "HANG:python-spin",
    ),
    "a loop in a thread that is not the main one": (
        frozen(8, [replace(look, threads=[{**look.threads[1], "main": False}, MAIN_WAITS])
                   for look in looks(9)]),
        "HANG:python-spin",
    ),
    "the GIL is held at work": (frozen(8, looks(9), beats=False), "HANG:gil-held"),
    "the GIL is held asleep": (frozen(8, beats=False, **ASLEEP), "HANG:gil-held"),
    "stopped": (frozen(8, cpu=0.0, beats=False, state="T"), "HANG:stopped"),
    "a lock": (frozen(8, looks(9, **IDLE_LOOKS), **AT_LOCK), "HANG:blocked"),
    "a lock, where nobody may look": (frozen(8, **AT_LOCK), "HANG:blocked"),
    "a lock, told by native frames": (
        frozen(8, [*looks(9, **IDLE_LOOKS),
                   *looks(10.9, frames=["libc:0 __futex_abstimed_wait"], tool="native", count=1)],
               cpu=0.0, state="S"),
        "HANG:blocked",
    ),
    "a lock, told by faulthandler and the kernel": (
        frozen(8, looks(9, frames=LOCK, gil=None, active=None, tool="faulthandler"), **AT_LOCK),
        "HANG:blocked",
    ),
    "a queue whose frames tell": (
        frozen(8, looks(9, frames=["/usr/lib/python3.11/queue.py:171 get", *LOCK], gil=False),
               cpu=0.0, state="S"),
        "HANG:blocked",
    ),
    "a sleep of an hour": (frozen(11, looks(12, **IDLE_LOOKS), **ASLEEP), "HANG:blocked"),
    "a pipe that stays empty": (frozen(11, looks(12, **IDLE_LOOKS), **PIPE), "HANG:blocked"),
    "at rest as its process ends": (
        frozen(8, looks(9), end=None, before_s=3.0),
        "HANG:python-spin",
    ),
}  # fmt: skip

NEAR = {
    "identical stacks, but P moves": (
        trial([*moving(20)], looks(17, at=p(16, fired=151))),
        "SLOW",
    ),
    "P moved after the looks": (
        trial([*moving(3), *resting(3, 8), *resting(11.25, 1, at=p(fired=5))], looks(9)),
        "SLOW",
    ),
    "two looks only": (frozen(8, looks(9, count=2)), "INCONCLUSIVE:unproven"),
    "three looks at one moment": (frozen(8, looks(10, apart_s=0.1)), "INCONCLUSIVE:unproven"),
    "another function at each look": (
        frozen(8, looks(9, each=[SPIN, [f"{TRAIN}:60 other", *SPIN[1:]], SPIN])),
        "INCONCLUSIVE:unproven",
    ),
    "a native call that let the GIL go": (frozen(8, looks(9, **NATIVE)), "INCONCLUSIVE:unproven"),
    "at work, and no py-spy": (
        frozen(8, looks(9, gil=None, active=None, tool="faulthandler")),
        "INCONCLUSIVE:unproven",
    ),
    "stopped for a look only": (
        trial([*moving(3), *resting(3, 7), *resting(10, 0.25, state="t")]),
        "INCONCLUSIVE:unproven",
    ),
    "continued in between": (
        trial([*moving(3), *resting(3, 4, state="T", cpu=0), *resting(7.25, 3, state="R")],
              looks(9, **NATIVE)),
        "INCONCLUSIVE:unproven",
    ),
    "no beat as it reads from a disk": (
        frozen(8, beats=False, cpu=0.0, state="D"),
        "INCONCLUSIVE:unproven",
    ),
    "no beat, and no core to beat on": (
        frozen(8, looks(9), beats=False, cpu=0.0, state="R"),
        "INCONCLUSIVE:unproven",
    ),
    "one line, and no core to go on with": (
        frozen(8, looks(9), cpu=0.02),
        "INCONCLUSIVE:unproven",
    ),
    "one beat": (
        trial([*moving(3), *resting(3, 4, beats=False), *resting(7.25, 4, beats=True)],
              looks(9, **NATIVE)),
        "INCONCLUSIVE:unproven",
    ),
    "a lock, and a thread at work": (
        frozen(8, looks(9, **IDLE_LOOKS), **{**AT_LOCK, "cpu": 0.5}),
        "INCONCLUSIVE:unproven",
    ),
    "a lock, and a device at work": (
        frozen(8, looks(9, **IDLE_LOOKS), **AT_LOCK, gpu=100.0),
        "INCONCLUSIVE:unproven",
    ),
    "a lock for 4 s": (frozen(4, looks(4, **IDLE_LOOKS), **AT_LOCK), "SLOW"),
    "a sleep of 8 s": (frozen(8, looks(9, **IDLE_LOOKS), **ASLEEP), "INCONCLUSIVE:unproven"),
    "a network that does not answer": (
        frozen(30, looks(30, **IDLE_LOOKS), **SOCKET),
        "INCONCLUSIVE:unproven",
    ),
    "idle, and nothing tells at what": (
        frozen(30, looks(30, **IDLE_LOOKS), cpu=0.0, state="S"),
        "INCONCLUSIVE:unproven",
    ),
    "it has rested as long before": (
        trial([*moving(2), *resting(2, 3, at=p(2, fired=9)), *resting(5.25, 6)], looks(9.5)),
        "SLOW",
    ),
    "a first step that compiles": (
        trial([*moving(1), *resting(1, 8, at=p(0, "forward"))], looks(7, at=p(0, "forward"))),
        "INCONCLUSIVE:unproven",
    ),
    "a step is predicted to take longer": (
        frozen(8, looks(9), predicted_s=60.0),
        "INCONCLUSIVE:unproven",
    ),
    "one line owns the GIL for 4 s": (frozen(4, looks(5)), "SLOW"),
}  # fmt: skip


RERUNS = {
    "rests at the same P": (frozen(20, looks(12, **NATIVE)), "HANG:unproven-native"),
    "comes further and rests again": (
        trial([*moving(5), *resting(5, 30, at=p(4))], looks(30, at=p(4), **NATIVE)),
        "SLOW",
    ),
    "comes further and moves": (trial(moving(40)), "SLOW"),
    "rests earlier": (
        trial([*moving(3), *resting(3, 30, at=p(2))], looks(30, at=p(2), **NATIVE)),
        "INCONCLUSIVE:unproven",
    ),
    "returns": (returned(), "PASS"),
    "returns, and an oracle is broken": (
        returned(oracles={"finite": oracle(False, "nan-grad")}),
        "FAIL:nan-grad",
    ),
    "crashes": (trial(moving(4), end=End("signal", -11, "SIGSEGV")), "CRASH:SIGSEGV"),
    "is proven": (frozen(20, looks(12)), "HANG:python-spin"),
    "cannot be trusted": (returned(preflight=["another process"]), "INCONCLUSIVE:preflight"),
    "is stopped": (
        trial(moving(2), end=End("stopped by the supervisor", -15, "caller")),
        "INCONCLUSIVE:unproven",
    ),
}
