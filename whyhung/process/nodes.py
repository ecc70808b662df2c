"""Several nodes that watch one job: each writes its ranks' last state and reads the others'."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from whyhung.process import child
from whyhung.process.observer import Observer
from whyhung.verdict import Verdict
from whyhung.watch import flight_recorder

SAID = "said.json"
OLD_S = 3600.0  # older reports are of another job
FLIGHTS = 5  # last collectives reported per rank
_RANKS = re.compile(r"\brank (\d+)")


def name(variables: Mapping[str, str] = os.environ) -> str:
    """Return this node's name, with the number of a Slurm task: several may watch on one node."""
    host = variables.get("SLURMD_NODENAME") or socket.gethostname()
    task = variables.get("SLURM_PROCID")
    return f"{host}-{task}" if task else host


class Nodes:
    """Folder shared by all nodes; `own` is this node's subfolder, with the state of its ranks."""

    def __init__(self, shared: Path) -> None:
        self.shared, self.name = shared, name()
        self.own = shared / self.name
        self.others: dict[str, dict[str, Any]] = {}

    def exchange(self, observer: Observer, ended: int | None = None) -> None:
        """Write this node's state and read that of the other nodes, collectives included."""
        evidence, verdict = observer.evidence, observer.verdict
        elsewhere = {rank for said in self.others.values() for rank in said["flights"]}
        own = {r: f for r, f in evidence.flights.items() if str(r) not in elsewhere}
        said = {
            "written": time.time(),
            "ended": ended,
            "ranks": {
                str(rank): {"p": str(p), "rests_s": rest_s}
                for rank, (p, rest_s) in observer.standing().items()
            },
            "flights": {
                str(rank): flight_recorder.kept(entries, FLIGHTS) for rank, entries in own.items()
            },
            "label": verdict.label if verdict else "",
            "line": verdict.line if verdict else "",
            "rank": verdict.numbers.get("rank") if verdict else None,
            "edges": list(verdict.edges) if verdict else [],
        }
        try:
            self.own.mkdir(parents=True, exist_ok=True)
            child.put(self.own / SAID, said)
            files = sorted(self.shared.glob(f"*/{SAID}"))
        except OSError:
            return
        self.others = {}
        for file in files:
            told = child.read(file)
            if file.parent != self.own and told and time.time() - told["written"] < OLD_S:
                self.others[file.parent.name] = told
                evidence.flights |= {int(r): f for r, f in told["flights"].items()}
        kept = [note for note in evidence.notes if not note.startswith("node ")]
        evidence.notes[:] = kept + self.notes()

    def notes(self) -> list[str]:
        """Return the state of the other nodes, one sentence each."""
        found = []
        for node, said in self.others.items():
            ago = max(0.0, time.time() - said["written"])
            told = [
                f"rank {rank} at {one['p']}" + (f", at rest for {one['rests_s']:.0f} s"
                                                if one["rests_s"] > 1 else "")
                for rank, one in said["ranks"].items()
            ]  # fmt: skip
            told += [f"its ranks have ended with exit code {said['ended']}"
                     ] * (said["ended"] is not None)  # fmt: skip
            stands = f"; {said['label']} at {said['line']}" if said["label"] else ""
            found.append(f"node {node}, {ago:.0f} s ago: {'; '.join(told)}{stands}")
        return found

    def spliced(self, verdict: Verdict) -> Verdict:
        """Return the verdict, with other nodes' reports on the ranks that its own wait for."""
        names = {
            rank: f"rank {rank} on {node}"
            for node, said in self.others.items() for rank in said["ranks"]
        }  # fmt: skip
        edges, wanted = [], set()
        for edge in verdict.edges:
            missing = [rank for rank in _RANKS.findall(edge["text"]) if rank in names]
            wanted |= set(missing)
            to = [*edge["to"], *(names[rank] for rank in missing)]
            edges.append({**edge, "to": list(dict.fromkeys(to))})
        for node, said in self.others.items():
            told = {edge["from"] for edge in said["edges"]}
            for edge in said["edges"]:
                there = {k: _on(edge[k], node) if k == "from" else edge[k] for k in edge}
                edges.append({**there, "to": [_on(to, node) for to in edge["to"]]})
            for rank in sorted(wanted & said["ranks"].keys()):
                if f"rank {rank}" not in told:
                    one, source = said["ranks"][rank], str(self.shared / node / SAID)
                    edges.append({
                        "from": names[rank], "at": "", "kind": "other", "text": f"is at {one['p']}",
                        "to": [], "left_s": None, "outside": True, "source": source,
                    })  # fmt: skip
        return replace(verdict, edges=tuple(edges))


def _on(label: str, node: str) -> str:
    return f"{label} on {node}"
