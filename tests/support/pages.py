"""Evidence and verdicts by hand for pages: who waits for whom, on one rank and on many."""

from whyhung.verdict import Verdict
from whyhung.watch.evidence import Evidence, P, Process, Sample, Snapshot, Thread, Wait

LIB = "/usr/lib/python3.11"
TORCH = "/x/lib/python3.11/site-packages/torch"
HOME = "/home/someone/project"
LOCKED = (
    f"{HOME}/train.py:31 evaluate",
    f"{HOME}/train.py:80 main",
    f"{HOME}/train.py:99 <module>",
)
REDUCE = (
    f"{TORCH}/distributed/distributed_c10d.py:2810 all_reduce",
    f"{TORCH}/distributed/c10d_logger.py:81 wrapper",
    f"{HOME}/train.py:40 step",
    f"{HOME}/train.py:99 <module>",
)
UPLOAD = (f"{HOME}/upload.py:12 put", f"{HOME}/train.py:52 save", f"{HOME}/train.py:99 <module>")
QUEUE = (f"{LIB}/threading.py:320 wait", f"{LIB}/queue.py:171 get", f"{HOME}/data.py:22 __next__",
         f"{HOME}/train.py:38 step")  # fmt: skip


def edge(who, at, kind, text, to=(), left_s=None, outside=False):
    return {"from": who, "at": at, "kind": kind, "text": text, "to": list(to), "left_s": left_s,
            "outside": outside, "source": "/proc/1/task/1/syscall"}  # fmt: skip


def main_thread(tid, frames=(), wait=None, **more):
    more = {"state": "S" if wait else "R", **more}
    return Thread(tid, "MainThread", True, frames=tuple(frames), wait=wait, **more)


def idle(number, first=900):
    return tuple(Thread(first + n, "", state="S", wchan="futex_wait") for n in range(number))


def seen(*processes, t=18.0, seconds=18.0, steps=6, verdict, **more):
    """(evidence, verdict) of processes whose progress has rested at step 3 for `seconds`."""
    p = P(3, "backward", 12, 4, 96)
    ranks = sorted({process.of for process in processes})
    samples = [
        Sample(i * seconds / 8, rank, p, i, 0.1 * i, "S") for i in range(9) for rank in ranks
    ]
    snapshots = [Snapshot(t, tuple(processes), dict.fromkeys(ranks, p))]
    evidence = Evidence({"subject": "train.py", "steps": steps}, seconds=t, samples=samples,
                        snapshots=snapshots, **more)  # fmt: skip
    return evidence, verdict


def lock():
    """A lock taken twice by the thread that holds it."""
    wait = Wait("lock", "waits for a lock that it holds itself", ((10, 10),), source="/proc/10")
    return seen(
        Process(10, of=0, rank=0, name="python train.py", state="S",
                threads=(main_thread(10, LOCKED, wait), *idle(14))),
        verdict=Verdict(
            "HANG", "lock", "waits, and nobody is left who could end that",
            ["rank 0 waits for a lock that it holds itself"], "train.py evaluate",
            line="train.py:31 evaluate",
            edges=(edge("rank 0", "train.py:31 evaluate", "lock", wait.text, ["rank 0"]),),
            settle=("py-spy dump --native --pid 10",),
        ),
    )  # fmt: skip


def ranks_wait(ranks=2, blamed=0):
    """All ranks but one wait in a collective; that one waits for another host."""
    others = [rank for rank in range(ranks) if rank != blamed]
    wait = Wait("collective", f"waits in all_reduce for rank {blamed}", ((100 + blamed, 0),))
    silent = Wait("socket", "reads from 10.0.0.7:443", outside=True)
    edges = [edge(f"rank {r}", "train.py:40 step", "collective", "waits in all_reduce",
                  [f"rank {blamed}"]) for r in others]  # fmt: skip
    edges.append(edge(f"rank {blamed}", "upload.py:12 put", "socket", silent.text, outside=True))
    evidence, verdict = seen(
        *(Process(100 + r, of=r, rank=r, name="python train.py", state="S",
                  threads=(main_thread(100 + r, REDUCE, wait), *idle(4, 1000 + 10 * r)))
          for r in others),
        Process(100 + blamed, of=blamed, rank=blamed, name="python train.py", state="S",
                threads=(main_thread(100 + blamed, UPLOAD, silent),)),
        verdict=Verdict("STALLED", "socket", "waits quietly for what may still come",
                        [f"rank {blamed} reads from 10.0.0.7:443"],
                        line="upload.py:12 put", edges=edges,
                        numbers={"rested_s": 18.0, "longest_s": 2.0}),
    )  # fmt: skip
    evidence.output = ["epoch 3", "saved model.pt"]
    return evidence, verdict


def worker_deadlock():
    """The main thread waits for a loader's worker, which waits for a lock nobody gives back."""
    wait = Wait("pipe", "reads a queue that process 12 fills", ((12, 0),))
    lock = Wait("lock", "waits for a lock whose owner is gone", ())
    frames = (f"{LIB}/logging/__init__.py:927 acquire", f"{HOME}/data.py:9 __getitem__")
    return seen(
        Process(11, of=0, rank=0, name="python train.py", state="S",
                threads=(main_thread(11, QUEUE, wait),)),
        Process(12, 11, of=0, name="python train.py", state="S",
                threads=(main_thread(12, frames, lock),)),
        Process(13, 11, of=0, name="sleep 15", state="S", threads=(main_thread(13),)),
        verdict=Verdict(
            "HANG", "lock", "waits, and nobody is left who could end that",
            ["the owner of the lock is gone"], line="data.py:9 __getitem__",
            edges=[edge("rank 0", "data.py:22 __next__", "pipe", wait.text, ["process 12"]),
                   edge("process 12", "data.py:9 __getitem__", "lock", lock.text)],
        ),
    )  # fmt: skip


def busy_worker():
    """A worker computes, while nothing is counted."""
    wait = Wait("child", "waits for child 4121", ((4121, 0),))

    def family(cpu_s):
        return (
            Process(4120, of=0, rank=0, name="python train.py", state="S", cpu_s=3.0,
                    threads=(main_thread(4120, QUEUE, wait),)),
            Process(4121, 4120, of=0, name="python train.py", state="R", cpu_s=cpu_s,
                    threads=(main_thread(4121, (f"{HOME}/bleu.py:8 score",), cpu_s=cpu_s),)),
        )  # fmt: skip

    evidence, verdict = seen(
        *family(14.0),
        verdict=Verdict("SLOW", "uncounted",
                        "makes no progress that is counted, and somebody works",
                        ["worker 4121 of rank 0 computes"], line="bleu.py:8 score"),
    )  # fmt: skip
    evidence.snapshots.insert(0, Snapshot(8.0, family(4.5), full=False))
    evidence.snapshots.insert(1, Snapshot(13.0, family(9.0), {}))
    return evidence, verdict


def many_threads(number=3000):
    """Start as many threads, each at a place of its own."""
    threads = tuple(
        Thread(100 + n, f"t{n}", state="S", frames=(f"{HOME}/serve.py:{n + 1} wait",))
        for n in range(number)
    )
    first = Process(10, of=0, rank=0, state="S", threads=(main_thread(10, LOCKED), *threads))
    return seen(first, verdict=Verdict("STALLED", "lock", "quiet", ["it waits"]))


def no_ptrace():
    """Nobody may look into the process."""
    why = "py-spy: permission denied; run it as root, or docker with --cap-add SYS_PTRACE"
    wait = Wait("socket", "reads a socket to 10.0.0.7:443", outside=True)
    return seen(
        Process(10, of=0, rank=0, state="S", threads=(main_thread(10, (), wait),), message=why),
        verdict=Verdict("STALLED", "socket", "waits quietly for what may still come", ["it waits"],
                        unknown=["at which line it waits"],
                        edges=[edge("rank 0", "", "socket", wait.text, outside=True)]),
    )  # fmt: skip


def nothing():
    return Evidence(), Verdict("INCONCLUSIVE", "nothing", "nothing was seen")


CASES = {
    "lock": lock, "ranks": ranks_wait, "worker": worker_deadlock, "busy": busy_worker,
    "threads": many_threads, "no ptrace": no_ptrace, "nothing": nothing,
    "64 ranks": lambda: ranks_wait(64, 3),
}  # fmt: skip
