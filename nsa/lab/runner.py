"""The supervisor of a trial: watches its progress from outside, and ends it when there is reason.

A trial that is late is looked at, not judged: what was seen is the evidence, the verdict another
module's. Nothing is left of a trial when `run` returns, whatever it did.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nsa.lab.evidence import Evidence


@dataclass(frozen=True)
class Spec:
    """What a trial runs: `steps` steps of `subject` ("package.module:make", see nsa.lab.subject).

    settings: handed to it, JSON-able. observers: names of what slows it and is no part of it.
    oracles: names out of nsa.lab.oracles. python: another interpreter, whose packages are used.
    """

    subject: str
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 3
    ranks: int = 1
    observers: tuple[str, ...] = ()
    oracles: tuple[str, ...] = ()
    seed: int = 0
    python: str | None = None
    env: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Spec:
        tuples = {name: tuple(found.get(name, ())) for name in ("observers", "oracles")}
        return cls(**{**found, **tuples})

    def id(self, source_hash: str, environment: dict[str, Any]) -> str:
        """Twelve hex digits: the same spec, source and environment have the same."""
        what = json.dumps([self.to_dict(), source_hash, environment], sort_keys=True, default=str)
        return hashlib.sha256(what.encode()).hexdigest()[:12]


def run(
    spec: Spec,
    *,
    folder: str | Path,
    predicted_s: float | None = None,
    deadline_s: float | None = None,
    stall_s: float = 5.0,
    keep: bool = True,
    stop: threading.Event | None = None,
) -> Evidence:
    """Runs the trial in processes of its own; returns what was seen, never raises for how it ended.

    predicted_s: what it should take; the soft deadline is 3 x that x the observers' factor.
    deadline_s: when it has to end (None: 4 x the soft deadline, or 600 s where nothing is
    predicted). stall_s: how long P may rest until it is looked at and ended.
    """
    raise NotImplementedError


def run_until_proven(spec: Spec, *, folder: str | Path, **options: Any) -> Evidence:
    """`run`, and where it stalled without proof a second time at twice the deadline, as `.again`."""
    raise NotImplementedError
