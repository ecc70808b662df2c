"""Run a soak in two processes, a growing training, and allocator settings, each supervised."""

import csv
import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas

from whyhung.process.trial import Outcome, run_child
from workbook.lab import sweep
from workbook.lab.observers.guard_rules import levels
from workbook.lab.search.factors import TRAINING
from workbook.lab.training import TrainingSpec
from workbook.runs.files import read_json

ENTRY = "workbook.rooms.soak.child:train"
SETTING_ENTRY = "workbook.rooms.soak.child:under_setting"
ALLOCATOR = TRAINING["allocator"]
VARIABLES = ALLOCATOR.env("any:1").keys()
LEAST_STEPS = 4  # of a soak: two processes of two steps
SETTLED = 5  # steps of a setting's trial that are not counted
USUAL = ""  # no allocator setting
PROCESSES = ("before the restart", "after the restart")
# A process's samples, one line per step.
FILE = "samples.csv"
COLUMNS = (
    "step", "seconds", "tensors_mib", "reserved_mib", "peak_mib", "host_mib", "loss", "grad_norm",
)  # fmt: skip
PLANT_AFTER = 10  # steps before a growing training grows
MIB = 2**20


@dataclass(frozen=True)
class Part:
    """One process: its spec, how it ended, and a row for each step that it recorded.

    `rows` have the columns of COLUMNS, even for a process that was killed.
    """

    spec: dict[str, Any]
    ended: Outcome
    rows: pandas.DataFrame = field(repr=False)

    @property
    def name(self) -> str:
        """Name of the process within a soak."""
        return "after the restart" if self.spec.get("resume") else "before the restart"

    @property
    def result(self) -> dict[str, Any]:
        """Result of `child.train`, {} if it failed."""
        return self.ended.result or {}

    @property
    def stop(self) -> dict[str, Any] | None:
        """Record of the guard that ended it, or None."""
        return self.result.get("stop")

    @property
    def saved(self) -> Path | None:
        """Checkpoint that it left, or None."""
        name = self.result.get("saved", "")
        found = Path(self.spec["checkpoints"]).parent / name
        return found if name.endswith(".pt") and found.is_file() else None

    @property
    def outcome(self) -> str:
        """Outcome in words: "ok", how the process ended, or the guard's message."""
        if self.ended.status != "ok":
            return f"{self.ended.status}: {self.ended.message}"
        return f"stopped, {self.stop['reason']}: {self.stop['message']}" if self.stop else "ok"


@dataclass(frozen=True)
class Soak:
    """Training of `steps` steps with a restart at half of them. The process before it goes on for
    `overlap` steps, so that the one after it can be compared with a training without a restart."""

    cell: TrainingSpec
    steps: int
    overlap: int
    limits_gib: tuple[float, float]  # warn, stop
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        if self.steps < LEAST_STEPS:
            raise ValueError(f"steps={self.steps} must be at least {LEAST_STEPS}")
        if not 1 <= self.overlap <= self.half:
            raise ValueError(f"overlap={self.overlap} must be 1 to {self.half}, half of the steps")
        warn, stop = self.limits_gib
        if not 0 < warn < stop:
            raise ValueError(
                f"warn_gib={warn:g} and stop_gib={stop:g} must be above 0 and grow; 60 and 65 would"
            )
        levels(self.guard)

    @property
    def half(self) -> int:
        """Step before which the training is restarted."""
        return self.steps // 2

    @property
    def guard(self) -> list[str]:
        """Arguments of `nsa train --guard`."""
        warn, stop = self.limits_gib
        return [f"memory={warn:.4f}GiB:warn,{stop:.4f}GiB:stop"]

    @property
    def on_gpu(self) -> bool:
        return self.cell.device == "cuda"

    @property
    def whole(self) -> bool:
        """True if both processes completed."""
        return len(self.parts) == 2 and all(part.outcome == "ok" for part in self.parts)

    def rows(self) -> list[pandas.DataFrame]:
        """Rows of each process, without the overlap."""
        kept = (slice(None, self.half), slice(self.half, None))
        found = zip(self.parts, kept, strict=False)
        return [part.rows.loc[part.rows["step"].isin(range(self.steps)[k])] for part, k in found]


def soak(
    cell: TrainingSpec,
    *,
    steps: int,
    overlap: int,
    limits_gib: tuple[float, float],
    folder: str | Path,
    entry: str = ENTRY,
    **options: Any,
) -> Soak:
    """Train in two processes, the second from the checkpoint that the first wrote.

    Checkpoints are kept in `folder` if it did not complete. options: deadline_s of each process,
    threads and progress. Raises ValueError for what cannot be run, before anything runs.
    """
    found = Soak(cell, steps, overlap, limits_gib)
    shared = {"cell": cell.to_dict(), "guard": found.guard}
    places = {"checkpoints": str(Path(folder).resolve() / "checkpoints")}
    first = {"until": min(found.half + overlap, steps), "save_at": found.half}
    before = part(PROCESSES[0], shared | first | places, folder, entry, **options)
    parts = (before,)
    if before.outcome == "ok" and before.saved:
        second = {"until": steps, "resume": str(before.saved)}
        after = part(PROCESSES[1], shared | second | places, folder, entry, **options)
        parts += (after,)
    found = replace(found, parts=parts)
    if found.whole:
        shutil.rmtree(places["checkpoints"])
    return found


def growing(
    cell: TrainingSpec,
    *,
    leak_mib: float,
    over_mib: Sequence[float],
    folder: str | Path,
    entry: str = ENTRY,
    **options: Any,
) -> Part:
    """Run a training that leaks a tensor of `leak_mib` MiB in each step, under limits `over_mib`
    (warn, stop) above its memory after the first PLANT_AFTER steps."""
    place = str(Path(folder).resolve() / "checkpoints")
    spec = {"cell": cell.to_dict(), "checkpoints": place, "leak_mib": leak_mib}
    spec |= {"over_mib": list(over_mib), "until": until(leak_mib, over_mib)}
    return part("a training that grows", spec, folder, entry, **options)


def until(leak_mib: float, over_mib: Sequence[float]) -> int:
    """Step at which a growing training ends if nothing stops it: about twice as many as needed.
    ValueError for limits that do not increase, or a leak that never reaches them."""
    if len(over_mib) != 2 or not 0 < over_mib[0] < over_mib[1] or not leak_mib > 0:
        raise ValueError(
            f"over_mib={list(over_mib)} and leak_mib={leak_mib} must be above 0, a limit to warn "
            "at and a higher one to stop at; [60, 65] and 4 would do"
        )
    return PLANT_AFTER + 2 * math.ceil(over_mib[1] / leak_mib)


def part(
    name: str,
    spec: dict[str, Any],
    folder: str | Path,
    entry: str = ENTRY,
    *,
    deadline_s: float,
    threads: int | None = None,
    progress: bool = True,
) -> Part:
    """Run `child.train` in a separate process; its rows are read however it ends."""
    place = Path(folder).resolve() / name.replace(" ", "-")
    spec = spec | {"folder": str(place), "threads": threads}
    [ended] = sweep.measure(
        entry,
        [name],
        lambda one, seconds: spec,
        deadline_s=deadline_s,
        progress=progress,
        said=lambda r: f"{r['steps_done']} steps" + ", stopped" * bool(r["stop"]),
        run=lambda entry, spec, *, folder, **how: run_child(entry, spec, folder=place, **how),
    )
    return Part(spec, ended, read(place / FILE))


def read(file: Path) -> pandas.DataFrame:
    """Read the rows that a process wrote; an unfinished line is dropped."""
    lines = [] if not file.is_file() else file.read_text(encoding="utf-8").split("\n")[1:-1]
    rows = [[float(value) for value in row] for row in csv.reader(lines)]
    return pandas.DataFrame(rows, columns=list(COLUMNS)).astype({"step": int})


def stored(folder: str | Path, steps: int, overlap: int) -> Soak:
    """Load the soak of a run's folder, as far as it got: its processes' specs, samples and results
    below `trials/soak`, or below `trials` if only committed files are there. A process without a
    result was ended from outside ("not run"), whatever it had sampled by then.

    Raises FileNotFoundError if no process of a soak left its spec there.
    """
    parts, whole = [], Path(folder) / "trials/soak"
    for name in (one.replace(" ", "-") for one in PROCESSES):
        place = (whole if whole.is_dir() else whole.parent) / name
        if not parts or (place / "spec.json").is_file():
            spec = json.loads((place / "spec.json").read_text(encoding="utf-8"))
            found = read_json(place / "result.json") or {}
            message = found.get("message", "" if found else "it was ended from outside")
            how = {"seconds": math.nan, "message": message, "returncode": None}
            ended = Outcome(found.get("status", "not run"), found.get("result"), **how)
            parts.append(Part(spec.get("spec", spec), ended, read(place / FILE)))
    [text] = parts[0].spec["guard"]
    warn, stop = (float(size) for size in re.findall(r"([\d.]+)GiB", text))
    cell = TrainingSpec.from_dict(parts[0].spec["cell"])
    return Soak(cell, steps, overlap, (warn, stop), tuple(parts))


@dataclass(frozen=True)
class Setting:
    """One trial of an allocator setting: MiB and seconds per step, empty if it failed."""

    name: str
    turn: int
    ended: Outcome

    def steps(self, of: str) -> list[float]:
        """Values of the settled steps for "seconds", "requested", "allocated", "reserved",
        "fragmentation", "inactive_split"."""
        return (self.ended.result or {}).get(of, [])[SETTLED:]

    @property
    def losses(self) -> list[float]:
        return (self.ended.result or {}).get("losses", [])


def check_settings(names: Sequence[str], steps: int) -> None:
    """Raise ValueError for a setting that torch's allocator cannot read, the usual one missing from
    several, or too few steps."""
    for name in names:
        ALLOCATOR.check(name)
    if names and (USUAL not in names or len(set(names)) < max(2, len(names))):
        raise ValueError(
            f"settings={list(names)} must hold '', the usual one, once, and another; or be empty"
        )
    if steps <= SETTLED:
        raise ValueError(f"setting_steps={steps} must be more than {SETTLED}, which are to settle")


def settings(
    cell: TrainingSpec,
    names: Sequence[str],
    *,
    steps: int,
    repeats: int,
    folder: str | Path,
    threads: int | None = None,
    entry: str = SETTING_ENTRY,
    **options: Any,
) -> list[Setting]:
    """Run the same training under each setting, interleaved as A B C, A B C: drift affects all.
    torch reads the setting once, so each trial is a process. options: of `sweep.measure`."""
    check_settings(names, steps)
    trials = [(name, turn) for turn in range(repeats) for name in names]
    same = {"cell": cell.to_dict(), "steps": steps, "threads": threads}
    ended = sweep.measure(
        entry,
        trials,
        lambda one, seconds: same | {"setting": one[0]},
        folder=folder,
        name=lambda one: f"{told(one[0])}, turn {one[1] + 1}",
        said=lambda r: f"{max(r.get('reserved', [math.nan])):,.0f} MiB reserved",
        run=_under,
        **options,
    )
    return [Setting(*trial, how) for trial, how in zip(trials, ended, strict=True)]


@dataclass(frozen=True)
class Estimated:
    """Estimate for a setting: MiB at a step's peak, NaN with the reason if there is no
    estimate."""

    name: str
    allocated: float
    reserved: float
    why: str = ""


def without_a_gpu() -> TrainingSpec:
    """Training to estimate if nothing can be measured: large enough for segments to matter."""
    how = {"backend": "gather", "precision": "bf16", "checkpoint": "all"}
    return TrainingSpec("production", 512, layers=2, **how)


def estimates(cell: TrainingSpec, names: Sequence[str], gpu: str) -> list[Estimated]:
    """Estimate what CUDA's allocator would hold under each setting in a later step of this training
    on that GPU: the step is traced once without a device, and the allocator is modelled."""
    from workbook.lab.estimate.alloc_conf import Settings
    from workbook.lab.estimate.gpus import gpu_named
    from workbook.lab.estimate.reserved import replay
    from workbook.lab.estimate.steps import run_of
    from workbook.lab.estimate.trace import trace

    try:
        chosen = gpu_named(gpu)
        run = run_of(trace(replace(cell, device="cuda"), chosen))
    except ValueError as error:
        return [Estimated(name, math.nan, math.nan, str(error)) for name in names]
    found = []
    for name in names:
        try:
            home = run.homes.__getitem__
            peak = replay(run.stream, Settings.parse(name), where=home).peak
        except ValueError as error:
            found.append(Estimated(name, math.nan, math.nan, str(error)))
        else:
            held = (peak.allocated, peak.reserved)
            found.append(Estimated(name, *((size + chosen.resident) / MIB for size in held)))
    return found


def told(setting: str) -> str:
    """Name of a setting."""
    return setting or "usual"


def _under(entry: str, spec: dict, *, env: Mapping[str, str], **options: Any) -> Outcome:
    """Run one trial; clears this process's own allocator settings for the usual one."""
    own = dict.fromkeys(VARIABLES & os.environ.keys(), "")
    return run_child(entry, spec, env={**env, **own, **ALLOCATOR.env(spec["setting"])}, **options)


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise ValueError for notebook parameters that cannot be run."""
    limits = values["warn_gib"], values["stop_gib"]
    Soak(cell_of(values, "cpu"), values["steps"], values["overlap"], limits)
    until(values["leak_mib"], values["over_mib"])
    check_settings(values["settings"], values["setting_steps"])


def cell_of(values: Mapping[str, Any], where: str) -> TrainingSpec:
    """Training of a notebook's parameters, on "cpu" or "cuda"."""
    names = ("preset", "backend", "tokens", "batch", "precision", "checkpoint", "data", "seed")
    same = {name: values[name] for name in names}
    return TrainingSpec(**same, layers=values["layers"] or None, device=where)
