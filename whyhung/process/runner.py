"""Run a trial in separate processes under a supervisor, and return the evidence.

A late trial is looked at, not judged: this module collects the evidence, another one gives the
verdict. Nothing is left of a trial when `run` returns, whatever it did.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from whyhung.process import (
    child,
    gpus,
    interpreters,
    preflight,
    ranks,
    renamed,
    script,
    trial,
)
from whyhung.process.printed import Printed
from whyhung.process.procfs import kernel_kills
from whyhung.process.supervisor import Supervisor, settle
from whyhung.watch import flight_recorder
from whyhung.watch.devices import device_use
from whyhung.watch.evidence import Evidence

SOFT = 3.0  # predictions from small work were seen to be off by 0.73 to 1.30
HARD = 4.0  # default deadline, in soft deadlines
UNPREDICTED_S = 600.0
ACTIONS = "report", "kill"
FAR_S = 1e6  # only the supervisor ends a trial


@dataclass(frozen=True)
class Spec:
    """Trial specification: `steps` steps of `subject` ("package.module:make", see process.subject).

    The subject may be a script, "train.py" or "package.module"; then `argv` are its arguments, as a
    list or one string, it has no number of steps, and settings only fill {name} in the arguments.

    settings: passed to it, JSON-serializable. observers: names of tools that slow it and are no
    part of it. oracles: names of the subject's attachment. python: another interpreter, whose
    packages are used. env: variables in addition to this process's own.

    Raises ValueError if it cannot be run.
    """

    subject: str
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int | None = 3  # None for a script
    ranks: int = 1
    observers: tuple[str, ...] = ()
    oracles: tuple[str, ...] = ()
    seed: int = 0
    python: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "observers", tuple(self.observers))
        object.__setattr__(self, "oracles", tuple(self.oracles))
        object.__setattr__(self, "argv", _words(self.argv))
        if script.is_script(self.subject):
            object.__setattr__(self, "steps", None)
            script.arguments(self.argv, self.settings)
        elif self.argv:
            raise ValueError(
                f"argv={list(self.argv)}: {self.subject} is no script; it has settings"
            )
        for name in ("steps", "ranks"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        try:
            json.dumps(self.settings)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the settings of {self.subject} must fit JSON: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Spec:
        """Return the Spec written by `to_dict`. Raises ValueError for an unknown name."""
        known = cls.__dataclass_fields__
        if wrong := [name for name in found if name not in known]:
            raise ValueError(f"a spec has no {wrong[0]!r}; it has {', '.join(known)}")
        if "subject" in found:
            found = {**found, "subject": renamed.current(found["subject"])}
        return cls(**found)

    def id(self, source_hash: str, environment: dict[str, Any]) -> str:
        """Return twelve hex digits, equal for the same spec, source and environment."""
        what = json.dumps([self.to_dict(), source_hash, environment], sort_keys=True, default=str)
        return hashlib.sha256(what.encode()).hexdigest()[:12]


def _words(argv: str | int | float | Sequence[Any]) -> tuple[str, ...]:
    try:
        words = argv if isinstance(argv, list | tuple) else shlex.split(str(argv))
    except ValueError as error:
        raise ValueError(f"argv={argv!r} cannot be split into words: {error}") from None
    return tuple(map(str, words))


def check_subject(subject: str) -> None:
    """Raise ValueError, with a remedy, if the subject cannot be found."""
    (script.check if script.is_script(subject) else trial.check_entry)(subject)


def soft_deadline(predicted_s: float, factor: float = 1.0) -> float:
    """Return the seconds after which work is late: 3 x prediction x slowdown by observers.

    Raises ValueError if predicted_s <= 0, or if factor < 1: no observer makes a step faster.
    """
    if not predicted_s > 0:
        raise ValueError(f"predicted_s={predicted_s} must be greater than 0 seconds")
    if not factor >= 1:
        raise ValueError(f"observer factor {factor} must be at least 1")
    return SOFT * predicted_s * factor


def run(
    spec: Spec,
    *,
    folder: str | Path,
    predicted_s: float | None = None,
    deadline_s: float | None = None,
    stall_s: float = 5.0,
    factor: float = 1.0,
    gpu: str | None = None,
    stop: threading.Event | None = None,
    on_hang: str = "report",
    on_stall: str = "report",
    tell: Callable[[dict[str, Any]], Any] = lambda report: None,
    attached: str | None = None,
) -> Evidence:
    """Run the trial and return the evidence; how it ended raises nothing.

    predicted_s: expected seconds of its steps; it is looked at after 3 x that x `factor`, the
    slowdown by its observers. deadline_s: when it has to end (None: 4 x as late; without a
    prediction after 600 s, and never for a script). Both count from the first step, not from the
    start of the process.
    stall_s: how long its progress may rest before it is looked at closely. on_hang, on_stall:
    "report" or "kill", the reaction to a certified hang and to a stall. tell: called with each
    report, also when it is withdrawn. folder: emptied first, it keeps the processes' files. gpu:
    the only GPU it sees, as lent by `whyhung.process.gpus`; the choice does not make it another
    trial. stop: ends it from another thread. attached: "package.module:Class", created in each
    rank's process to observe its steps, see process.subject; required by oracles and observers.

    Raises ValueError for an invalid subject, oracle, interpreter or time, OSError if `folder`
    cannot be written.
    """
    if spec.python is None:
        check_subject(spec.subject)
    else:
        interpreters.check(spec.python, spec.subject)
    kind = child.resolve(attached) if attached is not None else None
    if (spec.oracles or "measure" in spec.observers) and kind is None:
        raise ValueError(
            f"oracles={spec.oracles} and observers={spec.observers} want something attached; "
            "attached='workbook.lab.attached:Attached' would do"
        )
    if spec.oracles:
        kind.check(spec.oracles)
    times = {"predicted_s": predicted_s, "deadline_s": deadline_s, "stall_s": stall_s}
    for name, value in times.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value} must be greater than 0 seconds")
    for name, value in {"on_hang": on_hang, "on_stall": on_stall}.items():
        if value not in ACTIONS:
            raise ValueError(f"{name}={value!r} is none of {', '.join(ACTIONS)}")
    soft_s = soft_deadline(predicted_s, factor) if predicted_s else None
    folder = Path(folder).resolve()
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    stood_on = preflight.files(spec.subject)
    child.put(folder / "sources.json", stood_on)
    env = {**spec.env, **gpus.only(gpu)}
    on_gpu = preflight.uses_gpu(spec.settings, env)
    limit_s = None if script.is_script(spec.subject) else UNPREDICTED_S
    evidence = Evidence(
        spec=spec.to_dict(),
        environment=preflight.environment(spec.python) | {"source": preflight.digest_of(stood_on)},
        preflight=preflight.reasons(on_gpu, gpu),
        predicted_s=predicted_s,
        factor=factor,
        soft_s=soft_s,
        deadline_s=deadline_s or (HARD * soft_s if soft_s else limit_s),
        stall_s=stall_s,
    )
    used = preflight.used_mib(gpu) if on_gpu else []
    killed = kernel_kills() or 0
    with device_use(gpu) if on_gpu else contextlib.nullcontext() as use:
        kills = {"on_hang": on_hang, "on_stall": on_stall, "tell": tell}
        supervisor = Supervisor(evidence, folder, spec.ranks, stop=stop, use=use, **kills)
        started = time.monotonic()
        given = {"spec": spec.to_dict(), "folder": str(folder), "attached": attached}
        printed = Printed(folder)

        def watch(pid: int) -> str:
            printed.bound()
            return supervisor(pid)

        options: dict[str, Any] = {"folder": folder, "watch": watch, "python": spec.python}
        options |= {"deadline_s": FAR_S, "env": {**flight_recorder.ENVIRONMENT, **env}}
        if spec.ranks == 1:
            ended: Any = trial.run_child("whyhung.process.subject:run", given, **options)
        else:
            options["ranks"] = spec.ranks
            ended = ranks.run_ranks("whyhung.process.subject:run", given, **options)
        supervisor.close()
    evidence.seconds = time.monotonic() - started
    killed = (kernel_kills() or 0) > killed
    settle(evidence, ended, supervisor, folder, killed=killed, merge=kind and kind.merge)
    first = evidence.end.first_rank if evidence.end is not None else None
    evidence.output = printed.last(spec.ranks, first)
    evidence.notes += filter(None, [printed.note()])
    if on_gpu:
        evidence.notes += preflight.wait_until_free(used, only=gpu)
        now = preflight.reasons(True, gpu)
        evidence.preflight += [reason for reason in now if reason not in evidence.preflight]
    for pid, since in supervisor.pids.items():
        if preflight.remember(pid, since):
            evidence.notes.append(f"process {pid} could not be ended")
    return evidence
