"""Trace distributed training for three steps: each rank's gradients, buckets and modules.

Trials share a launch, since starting ranks takes longer than tracing them; one that aborts a launch
is recorded in a row, and the trials after it get another launch.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from whyhung.process.ranks import run_ranks
from workbook.lab.progress import lines
from workbook.lab.search.planted import FAULTS
from workbook.lab.training import TrainingSpec

ENTRY = "workbook.rooms.tracing.child:run"
OUTCOME = ("status", "message", "evidence", "place", "first")
TRAINED = ("losses", "weights", "unreachable", "parameters")
COLUMNS = {  # of each kind of row, beside its trial and rank
    "arrivals": ("step", "parameter", "state", "expected", "order", "ms"),
    "modules": ("step", "module", "order", "ms"),
    "buckets": ("step", "index", "elements", "bytes", "dtype", "is_last", "ms"),
    "gradients": ("way", "error", "parameter"),  # see `child.beside_one_process`
}
STEPS = 3  # DDP rebuilds its buckets after the first, with a static graph after the second


@dataclass(frozen=True)
class Trial:
    """One traced way of training; `compared`: also compared with a single process."""

    name: str
    kind: str = "ddp"  # or "fsdp"
    branch: str | None = None  # this branch alone
    static_graph: bool = False
    find_unused: bool = False
    fault: str | None = None  # of workbook.lab.search.planted
    compared: bool = False


CLEAN = (
    Trial("ddp", compared=True),
    Trial("static graph", static_graph=True, compared=True),
    Trial("static graph + find unused", static_graph=True, find_unused=True),
    Trial("fsdp", kind="fsdp", compared=True),
)
BRANCHES = tuple(Trial(f"{b} alone", branch=b, find_unused=True) for b in ("cmp", "slc", "win"))
PLANTED = tuple(Trial(fault, find_unused=True, fault=fault) for fault in FAULTS)
TRIALS = (*CLEAN, *BRANCHES, *PLANTED)


@dataclass(frozen=True)
class Setup(TrainingSpec):
    """Settings common to all trials. Raises ValueError for what no rank can run."""

    ranks: int = 2
    parallel: str = "ddp"  # overridden by each trial
    data: str = "synthetic"
    communication: str | None = None  # "gloo", "nccl"; None: NCCL on GPUs and gloo on CPUs
    bucket_mb: float = 25.0  # of DDP's buckets

    def __post_init__(self) -> None:
        from nsa.model import parallel

        if self.communication == "nccl" and self.device == "cpu":
            raise ValueError("communication='nccl' needs GPUs; on a CPU 'gloo' would do")
        if self.precision == "fp16":
            raise ValueError(
                "precision='fp16' scales gradients, so they are not those of one process; "
                "'fp32' or 'bf16' would do"
            )
        parallel.check("ddp", self.communication, bucket_mb=self.bucket_mb)
        super().__post_init__()

    def spec(self, trial: Trial) -> TrainingSpec:
        """Training of a trial. ValueError for what no rank can run."""
        changes = {"force_branch": trial.branch, **self.changes}
        return replace(self, parallel=trial.kind, changes=changes)


@dataclass
class Traced:
    """Result of a trace: rows of COLUMNS, each with its trial and rank; steps count from 1."""

    setup: Setup
    trials: tuple[Trial, ...]
    # status ("ok", "refused" by the options' own check, or one of `run_ranks`), message, evidence,
    # place, first, losses (nats, a step each), weights (a fingerprint after the last step)
    outcomes: list[dict] = field(default_factory=list)
    arrivals: list[dict] = field(default_factory=list)
    modules: list[dict] = field(default_factory=list)
    buckets: list[dict] = field(default_factory=list)
    gradients: list[dict] = field(default_factory=list)
    launches: int = 0

    def of(self, trial: str) -> list[dict]:
        """Outcomes of a trial, by rank; empty for one that was not tried."""
        return [row for row in self.outcomes if row["trial"] == trial]

    def ended(self, trial: str) -> bool:
        """Return True if the trial trained to its end on every rank."""
        rows = self.of(trial)
        return bool(rows) and all(row["status"] == "ok" for row in rows)

    def losses(self, trial: str) -> list[float]:
        """Losses of a trial, one per step; empty for one that did not end."""
        return self.of(trial)[0]["losses"] if self.ended(trial) else []


def trials_for(ranks: int, names: Iterable[str] = ()) -> tuple[Trial, ...]:
    """Select trials by name, all if none is given; for one rank, without those that need two.
    ValueError for an unknown name."""
    known = {trial.name: trial for trial in TRIALS}
    names = tuple(names)
    strangers = [name for name in names if name not in known]
    if strangers:
        raise ValueError(f"no trial {strangers[0]!r}; there are {', '.join(known)}")
    chosen = [known[name] for name in names or known]
    return tuple(trial for trial in chosen if ranks > 1 or trial.fault != "rank branch")


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise ValueError for notebook parameters that cannot be run."""
    names = ("preset", "tokens", "batch", "ranks", "backend", "precision", "bucket_mb", "data")
    layers, how = values["layers"] or None, values["communication"]
    where = "cpu" if values["device"] == "cpu" or how != "nccl" else "cuda"
    same = {name: values[name] for name in names} | {"layers": layers, "device": where}
    setup = Setup(**same, communication=None if how == "auto" else how)
    for trial in trials_for(values["ranks"], values["trials"]):
        if trial.name != "static graph + find unused":  # it is expected to be refused
            setup.spec(trial)


def trace(
    setup: Setup,
    trials: Sequence[Trial] = TRIALS,
    *,
    deadline_s: float,
    folder: str | Path,
    threads: int | None = None,
    progress: bool = True,
    entry: str = ENTRY,
) -> Traced:
    """Trace three training steps of each trial on every rank, under torchrun in child processes.

    deadline_s: for each launch; usually there is one. threads: torch's CPU threads in each rank.
    `folder` keeps the files and output of each rank. A trial that fails gives a row for each rank,
    with its traceback or its last place, and never an exception here.
    """
    found, todo = Traced(setup, tuple(trials)), list(enumerate(trials))
    how = {"ranks": setup.ranks, "deadline_s": deadline_s}
    how["env"] = {"CUDA_VISIBLE_DEVICES": ""} if setup.device == "cpu" else None
    with lines(len(trials), progress, "trial") as say:
        while todo:
            place = Path(folder, f"launch-{found.launches}")
            place.mkdir(parents=True, exist_ok=True)
            for left in place.glob("trial-*.json"):
                left.unlink()
            spec = {"setup": asdict(setup), "folder": str(place.resolve()), "threads": threads}
            spec["trials"] = [[number, asdict(trial)] for number, trial in todo]
            rows = run_ranks(entry, spec, folder=place, **how)
            found.launches += 1
            todo = todo[_collect(found, todo, rows, place, say) :]
    return found


def _collect(found: Traced, todo: list, rows: list[dict], place: Path, say: Callable) -> int:
    """Add the results of a launch; return how many of its trials are decided."""
    none_began = not any(row["place"].startswith("trial ") for row in rows)
    for done, (number, trial) in enumerate(todo, 1):
        records = [_record(place / f"trial-{number}-rank-{row['rank']}.json", row) for row in rows]
        if trial.kind == "fsdp":
            _judge_shards_together(records)
        for rank, record in enumerate(records):
            who, result = {"trial": trial.name, "rank": rank}, record.get("result") or {}
            told = {name: record.get(name, "") for name in OUTCOME}
            found.outcomes.append(who | told | {name: result.get(name) for name in TRAINED})
            for kind in COLUMNS:
                getattr(found, kind).extend(who | row for row in result.get(kind, ()))
        ends = ", ".join(dict.fromkeys(record["status"] for record in records))
        said = f" ({why(records).splitlines()[0][:100]})" if why(records) else ""
        say(f"{trial.name}: {ends}{said}", f"[{1 + number}/{len(found.trials)}] ")
        if not (none_began or all(record["whole"] for record in records)):
            return done  # this one ended the launch
    return len(todo)


def _record(file: Path, row: dict) -> dict:
    """Read the rank's record of a trial or, if there is none, how the rank ended."""
    try:
        left = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        status = "ended" if row["status"] == "ok" else row["status"]
        return {**row, "status": status, "whole": False}
    whole = left["status"] in ("ok", "refused")
    return {**left, "first": row["first"] and not whole, "whole": whole}


def _judge_shards_together(records: list[dict]) -> None:
    """Mark a sharded gradient as zero only if it is zero on all ranks; each sees only its rows."""
    every = [row for record in records for row in (record.get("result") or {}).get("arrivals", ())]
    alive = {(row["step"], row["parameter"]) for row in every if row["state"] == "arrived"}
    for row in every:
        if row["state"] == "zero" and (row["step"], row["parameter"]) in alive:
            row["state"] = "arrived"


def why(rows: Iterable[dict]) -> str:
    """Message of the rank that failed first, from a trial's rows; "" if there is none."""
    said = sorted(rows, key=lambda row: (not row["first"], row["status"] == "ended"))
    return next((row["message"] for row in said if row["message"]), "")
