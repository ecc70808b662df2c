"""Known causes of waits: a lock copied by fork, a dead worker of a pool, a full queue."""

from __future__ import annotations

import os
from collections.abc import Sequence

from whyhung.verdict.frames import is_in
from whyhung.verdict.graph import Graph, Node
from whyhung.watch.evidence import Process, Thread

LATER_S = 1.0  # workers of a pool begin together
_TICKS = os.sysconf("SC_CLK_TCK")
_POOL, _QUEUES = "multiprocessing/pool.py", "multiprocessing/queues.py"


def named_causes(graph: Graph, chain: Sequence[Node]) -> list[str]:
    """Return sentences on known causes that hold up the nodes of a chain; each once."""
    found = []
    for node in chain:
        process, thread = graph.process(node), graph.threads[node]
        if process is not None:
            found += [_after_fork(graph, node, process, thread), _full_queue(graph, node, thread)]
    found += _replaced(graph, chain)
    return list(dict.fromkeys(filter(None, found)))


def _after_fork(graph: Graph, node: Node, process: Process, thread: Thread) -> str:
    """Return a sentence on a forked process whose only thread waits for its own lock, or ""."""
    if not waits_after_fork(process, thread):
        return ""
    return (
        f"{graph.label(node)} was forked, and no thread of its own could release that: a lock that "
        "another thread held at the fork stays locked in the child for ever (start workers with "
        "spawn or forkserver, or before such a thread)"
    )


def waits_after_fork(process: Process, thread: Thread) -> bool:
    """Return True if it waits for a lock of its own process, where no other thread runs Python."""
    wait = thread.wait
    alone = not any(t.frames for t in process.threads if t.tid != thread.tid and not t.ours)
    own = wait is not None and {pid for pid, _ in wait.wakers} == {process.pid}
    forked = process.name.endswith("(forked)") or process.name.startswith("pt_data_")
    return bool(forked and thread.main and alone and own and wait.kind == "lock"
                and wait.left_s is None)  # fmt: skip


def _full_queue(graph: Graph, node: Node, thread: Thread) -> str:
    if (
        not is_in(thread.frames, _QUEUES, "_feed")
        or thread.wait is None
        or not thread.wait.text.startswith("writes")
    ):
        return ""
    return (
        f"{graph.label(node)} feeds a queue whose pipe is full, and ends only when somebody gets "
        "what is in it: get() everything before join()"
    )


def _replaced(graph: Graph, chain: Sequence[Node]) -> list[str]:
    """Return sentences on workers of a pool that began later than its others."""
    pids = dict.fromkeys(node[0] for node in chain)
    workers = [p for pid in pids if (p := graph.snapshot.process(pid)) and _of_pool(p)]
    first = {w.parent: min(o.started for o in workers if o.parent == w.parent) for w in workers}
    found = []
    for worker in workers:
        late_s = (worker.started - first[worker.parent]) / _TICKS
        if late_s > LATER_S:
            found.append(
                f"process {worker.pid} joined its pool {late_s:.0f} s after the others, in the "
                "place of a worker that has ended: a task that such a one was killed at is lost, "
                "and its result never comes"
            )
    return found


def _of_pool(process: Process) -> bool:
    main = process.main()
    return main is not None and is_in(main.frames, _POOL, "worker")
