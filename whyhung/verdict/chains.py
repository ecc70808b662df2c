"""Chains of a wait-for graph: their beginning, end and cycles, and their nodes in words."""

from __future__ import annotations

from whyhung.verdict.frames import user_line
from whyhung.verdict.graph import Graph, Node


def main_of(graph: Graph, rank: int) -> Node | None:
    process = graph.snapshot.of(rank)
    nodes = [] if process is None else [(process.pid, t.tid) for t in process.threads if t.main]
    return nodes[0] if nodes and nodes[0] in graph.threads else None


def root_of(graph: Graph, main: Node) -> Node:
    """Return the end of the chain, followed from process to process within the run."""
    seen, node = {main[0]}, main
    while True:
        others = [*graph.everyone.get(node, ()), *graph.anyone.get(node, ())]
        beyond = [other for other in others if other[0] not in seen and _is_own(graph, other)]
        if not beyond:
            return node
        pid = beyond[0][0]
        seen.add(pid)
        mains = [n for n, t in graph.threads.items() if n[0] == pid and t.main]
        node = next((other for other in beyond if other[0] == pid and other in mains), beyond[0])


def _is_own(graph: Graph, node: Node) -> bool:
    """Return True if its process belongs to a rank of the run, and is no launcher or stranger."""
    process = graph.process(node)
    return process is None or process.of >= 0


def cycle_from(graph: Graph, start: Node) -> list[Node]:
    """Return the cycle of known owners that `start` leads into; [] if owners are unknown."""
    path, node = [], start
    while node not in path:
        path.append(node)
        others = [*graph.everyone.get(node, ()), *graph.anyone.get(node, ())]
        wait = graph.threads[node].wait if node in graph.threads else None
        any_thread = wait is not None and any(not tid for _, tid in wait.wakers)
        if len(others) != 1 or (any_thread and node not in graph.everyone):
            return []
        node = others[0]
    return path[path.index(node) :]


def tells(graph: Graph, main: Node, node: Node) -> bool:
    """Return True if a node belongs in the picture: one of many idle threads does not."""
    thread = graph.threads[node]
    beyond = node[0] != main[0] and (thread.main or node == root_of(graph, main))
    return node == main or beyond or bool(user_line(thread.frames))


def works_at(graph: Graph, node: Node) -> str:
    thread, process = graph.threads[node], graph.process(node)
    at = user_line(thread.frames)
    if graph.free.get(node) == "its progress moves":
        return f"{graph.label(node)} makes progress, and is waited for"
    how = "works in native code" if thread.native and not thread.frames else "works"
    if process is not None and thread.wait is not None and thread.wait.kind in ("pipe", "socket"):
        how = "reads or writes"
    return f"{graph.label(node)} {how}" + (f", at {at}" if at else "")


def sentence(graph: Graph, node: Node) -> str:
    thread = graph.threads[node]
    at = user_line(thread.frames)
    wait = thread.wait.text if thread.wait else "sleeps, and nothing tells for what"
    left = thread.wait.left_s if thread.wait else None
    more = "" if left is None else f" ({left:.0f} s left)"
    return f"{graph.label(node)} {wait}{more}" + (f", at {at}" if at else "")
