"""Evidence written by hand: a trial that trains for a while, and then what a test says."""

from dataclasses import replace

from whyhung.watch.evidence import (
    End,
    Evidence,
    P,
    Process,
    Sample,
    Snapshot,
    Thread,
    Wait,
)

STEPS = 6
EVERY_S = 0.25  # from one sample to the next
SPEC = {"subject": "somebody:make", "steps": STEPS, "ranks": 1, "settings": {}}
STOPPED = End("stopped by the supervisor", -15, "deadline", "still running after 20 s")
TRAIN = "/home/someone/train.py"
SPIN = [f"{TRAIN}:31 never_ends", f"{TRAIN}:12 backward", "/x/lib/python3.11/site.py:3 main"]


def p(step=3, phase="backward", modules=12, fired=4, total=203, **more):
    return P(step, phase, modules, fired, total, **more)


def moving(seconds, *, rank=0, each_s=1.0, **how):
    """Samples of a rank that works: a node at each, a step each `each_s`."""
    found = []
    for number in range(round(seconds / EVERY_S)):
        t = number * EVERY_S
        at = p(int(t / each_s), fired=1 + int(200 * (t % each_s) / each_s))
        found.append(_sample(t, rank, at, t, **how))
    return found


def resting(since, seconds, *, rank=0, at=None, **how):
    """Samples of a rank whose P rests: at full use of a core and with beats unless told."""
    times = [i * EVERY_S for i in range(round(seconds / EVERY_S) + 1)]
    return [_sample(since + t, rank, at or p(), t, before_s=since, **how) for t in times]


def _sample(
    t, rank, at, lasted, *, cpu=1.0, beats=True, state="R", wchan="", before_s=0.0, gpu=None
):
    beat = int(10 * before_s) + (int(10 * lasted) if beats else 0)
    return Sample(t, rank, at, beat, before_s + cpu * lasted, state, wchan, 100.0, gpu)


def thread(tid=1, *, main=True, wait=None, frames=SPIN, **more):
    """A thread that runs, or waits: ("lock", text, wakers) or a Wait."""
    if isinstance(wait, tuple):
        wait = Wait(*wait)
    state = more.pop("state", "R" if wait is None else "S")
    return Thread(tid, "MainThread" if main else f"t{tid}", main, state, frames=tuple(frames),
                  wait=wait, **more)  # fmt: skip


def process(*threads, pid=1, rank=0, of=None, **more):
    """Process of a rank, or of a rank's worker (rank None)."""
    of = (rank or 0) if of is None else of
    return Process(pid, of=of, rank=rank, name="python train.py", state=more.pop("state", "S"),
                   threads=threads or (thread(pid),), **more)  # fmt: skip


def snapshots(since, *processes, each=None, count=4, apart_s=1.0, at=None, each_cpu_s=0.0):
    """`count` looks at the same processes; `each`: those of every look, in their order.

    each_cpu_s: processor time that every main thread without a wait uses from look to look.
    """
    found = []
    for number, seen in enumerate(each or [processes] * count):
        used = [_with_cpu(one, number * each_cpu_s) for one in seen]
        ranks = {one.rank for one in seen if one.rank is not None}
        found.append(
            Snapshot(since + apart_s * number, tuple(used), dict.fromkeys(ranks, at or p()))
        )
    return found


def _with_cpu(one, cpu_s):
    threads = [replace(t, cpu_s=t.cpu_s + cpu_s) if t.wait is None else t for t in one.threads]
    return replace(one, threads=tuple(threads))


def trial(samples=(), looked=(), end=STOPPED, **more):
    """Evidence of it, whose predictions say that it is late."""
    samples = sorted(samples, key=lambda s: s.t)
    seconds = samples[-1].t if samples else 2.0
    known = {"predicted_s": 2.0, "soft_s": 6.0, "deadline_s": 20.0, "began_s": 0.0}
    return Evidence(
        spec=dict(SPEC), seconds=seconds, samples=samples, snapshots=list(looked), end=end,
        **{**known, **more},
    )  # fmt: skip


def frozen(seconds=8.0, looked=(), before_s=3.0, **how):
    """Trains for 3 s and then rests."""
    known = ("end", "stall_s", "flights", "locks", "predicted_s")
    more = {name: how.pop(name) for name in known if name in how}
    samples = [*moving(before_s), *resting(before_s, seconds, **how)]
    return trial(samples, looked, **more)


def returned(**more):
    """A trial that did all its steps."""
    known = {"losses": [1.0] * STEPS, "soft_s": None, "predicted_s": None}
    return trial(moving(STEPS), end=End("returned", 0), **{**known, **more})


def oracle(ok=True, what="", detail="as it should be", place=""):
    return {"ok": ok, "what": what, "detail": detail, "place": place}
