"""Cells of a throughput table, and their measurement, each in separate processes."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

from nsa.spelling import nearest, pair
from whyhung.process import gpus
from whyhung.process.ranks import run_ranks
from whyhung.process.trial import Outcome, run_child
from workbook.lab import sweep
from workbook.lab.training import (
    DENSE,
    TrainingSpec,
    attention_named,
    check_switch,
    check_whole,
    open_trainer,
)

ENTRY = "workbook.rooms.throughput.child:measure_rank"
CURVE_ENTRY = "workbook.rooms.throughput.child:train"
PROFILE_ENTRY = "workbook.rooms.throughput.child:profile_cell"
DATA_SEED = 1337
LEAST_WARMUP = 3  # steps 0 to 2: kernels are compiled, optimizer state is made, buckets are rebuilt
SWITCHES = ("compile", "cuda_graph", "observe")
TOLD = ("attention", "backend", "tokens")  # shown by a cell's name and T
# A job is as slow, and as large, as its slowest and largest rank.
WORST = ("step_ms", "step_ms_q20", "step_ms_q80", "peak_mib", "loader_wait_ms", "recompilations")


@dataclass(frozen=True)
class TrainCell(TrainingSpec):
    """Training of `warmup` untimed steps and `steps` timed ones. The data are the same for every
    seed. Raises ValueError for anything that cannot be run."""

    observe: bool = False  # also measure the cost of all observers, after the steps
    warmup: int = LEAST_WARMUP
    steps: int = 20
    variant: str = ""  # the changes by which `with_` made this cell

    def __post_init__(self) -> None:
        check_whole(self, {"warmup": LEAST_WARMUP, "steps": 2})
        check_switch(self, "observe")
        if self.observe and (self.compile or self.cuda_graph):
            raise ValueError("observe hooks modules, which compile and cuda_graph leave out")
        super().__post_init__()

    def with_(self, text: str) -> "TrainCell":
        """Return a copy with the fields named in `text`: "compile", "checkpoint=all batch=1".

        "attention=dense backend=auto" gives its baseline. Its variant is the words except for TOLD.

        Raises ValueError for a field that a cell does not have, naming the nearest.
        """
        values, words = self.to_dict(), self.variant.split()
        for word in text.split():
            switched = f"{word}=true" if word in SWITCHES else word
            name, value = pair(switched, f"batch=8, or {', '.join(SWITCHES)} alone", "=:")
            if name not in values:
                raise ValueError(f"{word!r} in {text!r} changes nothing; {nearest(name, values)}")
            words += [word] * (name not in TOLD)
            if isinstance(values[name], bool):
                values[name] = value.lower() == "true"
            else:
                values[name] = int(value) if value.isdigit() else value
        return TrainCell(**values | {"variant": " ".join(words)})

    def __str__(self) -> str:
        size = f"T={self.tokens} batch {self.batch} {self.precision} {self.device}"
        return self.told(self.name, size, SWITCHES)


@contextmanager
def opened(spec: Mapping[str, Any], **changes: Any) -> Iterator[tuple[TrainCell, Any]]:
    """Yield a child's cell, spec["cell"], and its trainer, whose batches are prefetched and the
    same for every seed. spec["threads"]: torch's on the CPU; changes: as in `open_trainer`."""
    cell = TrainCell.from_dict(spec["cell"])
    how = {"threads": spec.get("threads"), "data_seed": DATA_SEED, "prefetch": True}
    with open_trainer(cell, **how, **changes) as trainer:
        yield cell, trainer


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank, over the timed steps unless noted otherwise; a row has the job's.
    NaN, empty or None if it failed, or if there was nothing to measure."""

    tokens_s: float = nan  # of the whole job, by the device's own clock
    recount_tokens_s: float = nan  # by the wall clock, from an idle device to an idle device
    step_ms: float = nan  # the median
    step_ms_q20: float = nan
    step_ms_q80: float = nan
    step_ms_each: list = field(default_factory=list)
    phase_ms: dict = field(default_factory=dict)  # of steps watched after the timed ones
    communication_ms: float = nan  # DDP's; FSDP2 and a CUDA graph cannot run without sending
    loader_wait_ms: float = nan  # a step's mean
    peak_mib: float = nan  # with a CUDA graph, since the process began: its memory is never freed
    device_mib: list = field(default_factory=list)  # after each step
    host_mib: list = field(default_factory=list)
    recompilations: float = nan
    syncs: int | None = None  # the host's waits in one step; None without a GPU
    losses: list = field(default_factory=list)  # of the warm-up, too
    parameters: float = nan
    matmul_tflops: float = nan  # measured on this device
    nominal_tflops: float = nan
    watched_ms: float = nan  # a step with all observers, if `observe`
    unwatched_ms: float = nan
    watched_times: float = nan
    paths: dict = field(default_factory=dict)  # implementations that served each branch
    by_rank: list = field(default_factory=list)  # each rank's own, of several
    device_name: str = ""
    torch: str = ""
    threads: int | None = None  # torch's, on the CPU


def throughput_grid(
    preset: str,
    backends: Sequence[str],
    tokens: Sequence[int],
    *,
    step_tokens: int,
    long_backends: Sequence[str] = (),
    long_tokens: Sequence[int] = (),
    variants: Sequence[str] = (),
    ranks: Sequence[int] = (1,),
    parallel: Sequence[str] = ("ddp",),
    **fixed: Any,
) -> list[TrainCell]:
    """Make the cells, most decisive first, since the last ones may run out of time.

    First come the first of `backends` and the dense baseline at each of `tokens`, then
    `long_backends` at each of `long_tokens`, then ranks and variants, last the other backends.
    "dense" among the backends is the dense baseline. A step has max(1, `step_tokens` // T)
    sequences. `variants`, see `TrainCell.with_`, change the first backend at the first T; so does
    each number of ranks above 1, with each kind of `parallel` and that many times the batch.

    Raises ValueError for anything illegal, before any cell runs, and for a grid without cells.
    """

    def plain(length: int, name: str) -> TrainCell:
        batch, how = max(1, step_tokens // length), attention_named(name)
        return TrainCell(preset=preset, tokens=length, batch=batch, **how, **fixed)

    deciding = [name for name in backends if name in (backends[0], DENSE)]
    pairs = dict.fromkeys([*product(tokens, deciding), *product(long_tokens, long_backends)])
    if not pairs:
        raise ValueError(f"no cell to measure: backends={backends}, tokens={tokens}")
    cells = [plain(*one) for one in pairs]
    first = cells[0]
    for count, kind in product([count for count in ranks if count != 1], parallel):
        cells.append(first.with_(f"batch={count * first.batch} ranks={count} parallel={kind}"))
    cells += [first.with_(text) for text in variants]
    others = dict.fromkeys(product(tokens, backends))
    return cells + [plain(*one) for one in others if one not in pairs]


def curve_grid(
    preset: str,
    backends: Sequence[str],
    *,
    tokens: int,
    batch: int,
    steps: int,
    variant: str = "",
    **fixed: Any,
) -> list[TrainCell]:
    """Make a cell per backend, "dense" the baseline; none if `steps` is 0. `variant` is for all."""
    if not steps:
        return []
    cells = throughput_grid(preset, backends, [tokens], step_tokens=batch * tokens, **fixed)
    return [replace(cell, steps=max(steps, LEAST_WARMUP)).with_(variant) for cell in cells]


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise ValueError for notebook parameters that cannot be run."""
    both = {name: values[name] for name in ("preset", "precision")}
    names = ("backends", "tokens", "step_tokens", "long_backends", "long_tokens", "variants")
    names += ("ranks", "parallel", "steps")
    throughput_grid(**both, **{name: values[name] for name in names})
    names = ("backends", "tokens", "batch", "steps", "variant")
    curve_grid(**both, **{name: values[f"curve_{name}"] for name in names})


def measure(
    cells: Sequence[TrainCell],
    *,
    threads: int | None = None,
    entry: str = ENTRY,
    **options: Any,
) -> list[dict]:
    """Measure the cells, one row each, in order; never two at once, which would distort times.

    A row has the cell's fields, `outcome` (see `sweep.measure`), `message`, `evidence`, `seconds`,
    `timing` ("absolute" on a GPU, "ratio" on a CPU, whose times may only be compared with each
    other) and the fields of `Measured`. Several ranks run under torchrun; the row is then the
    job's, and `by_rank` keeps each rank's own.

    threads: torch's CPU threads in each rank. options: deadline_s, budget_s, folder and progress of
    `sweep.measure`. Raises ValueError for an illegal deadline before any cell runs.
    """
    ended = sweep.measure(
        entry,
        cells,
        lambda cell, s: {"cell": cell.to_dict(), "threads": threads, "deadline_s": s},
        said=lambda r: f"{r['tokens_s']:,.0f} tokens/s, {r['step_ms']:.1f} ms a step",
        workers=1,
        run=_run,
        **options,
    )
    return [row_of(cell, how) for cell, how in zip(cells, ended, strict=True)]


def row_of(cell: TrainCell, ended: Outcome) -> dict:
    """Make one flat row of a cell, its outcome and its measurements; see `measure`."""
    row = {**cell.to_dict(), "name": cell.name, "outcome": ended.status}
    row |= {name: getattr(ended, name) for name in ("message", "evidence", "seconds")}
    row["timing"] = "absolute" if cell.device == "cuda" else "ratio"
    return row | asdict(Measured(**(ended.result or {})))


def _run(entry: str, spec: dict, *, folder: Path | None, **options: Any) -> Outcome:
    """Run one cell, in one process or several ranks."""
    if spec["cell"]["parallel"] == "none":
        return run_child(entry, spec, folder=folder, **options)
    ranks = spec["cell"]["ranks"]
    with tempfile.TemporaryDirectory(prefix="nsa-ranks-") as temporary:
        found = run_ranks(entry, spec, ranks=ranks, folder=folder or temporary, **options)
    seconds = found[0]["seconds"]
    bad = [rank for rank in found if rank["status"] != "ok"]
    if not bad:
        return Outcome("ok", _job([rank["result"] for rank in found]), seconds, "", 0)
    first = next((rank for rank in bad if rank["first"]), bad[0])
    status = "error" if first["status"] == "ended" else first["status"]
    message = f"rank {first['rank']} of {ranks}: {first['message']}"
    return Outcome(status, None, seconds, message, None, first["evidence"])


def _job(ranks: Sequence[dict]) -> dict:
    """Combine the ranks' measurements into the job's."""
    first = ranks[0]
    if len(ranks) == 1 or "declined" in first:
        return first
    kept = (*WORST, "tokens_s", "phase_ms", "syncs")
    worst = WORST if first["syncs"] is None else (*WORST, "syncs")
    losses = zip(*(rank["losses"] for rank in ranks), strict=True)
    return first | {
        "by_rank": [{name: rank[name] for name in kept} for rank in ranks],
        **{name: max(rank[name] for rank in ranks) for name in worst},
        **{name: min(rank[name] for rank in ranks) for name in ("tokens_s", "recount_tokens_s")},
        "losses": [sum(each) / len(each) for each in losses],
    }


def measure_curves(
    cells: Sequence[TrainCell],
    seeds: Sequence[int],
    *,
    threads: int | None = None,
    workers: int = 1,
    **options: Any,
) -> list[dict]:
    """Train curves; a row per cell: its fields, `outcome`, `message`, `seconds`, `losses` {seed:
    nats} and, for the first seed, `device_mib` and `host_mib` after each step.

    A cell trains exactly `steps` steps, with a cosine schedule down to 0. Each seed is trained in a
    separate child process; if one fails, the row has its outcome and keeps the others' losses.
    Nothing is timed, so `workers` of them may run at once: for "cuda", that many on each visible
    GPU, sharing its memory. options: as in `measure`. Raises ValueError without a seed.
    """
    seeds = tuple(dict.fromkeys(seeds))
    if cells and not seeds:
        raise ValueError("seeds=[] trains nothing; each is a whole number from 0 on, as in [1, 2]")
    on_gpu = any(cell.device == "cuda" for cell in cells)
    found = sweep.measure(
        CURVE_ENTRY,
        list(product(cells, seeds)),
        lambda one, s: {"cell": one[0].to_dict(), "seed": one[1], "threads": threads},
        workers=workers,
        gpus=gpus.Gpus(gpus.all_visible().names * workers if on_gpu else ()),
        name=lambda one: f"{one[0]} seed {one[1]}",
        said=lambda result: f"last loss {result['losses'][-1]:.4f}",
        **options,
    )
    ended = iter(found)
    return [_curve_row(cell, {seed: next(ended) for seed in seeds}) for cell in cells]


def _curve_row(cell: TrainCell, curves: dict[int, Outcome]) -> dict:
    """Make the cell's row from the outcomes of its seeds."""
    row = {**cell.to_dict(), "name": cell.name, "variant": "curve", "timing": "none"}
    row |= {"outcome": "ok", "message": ""}
    for seed, curve in reversed(curves.items()):  # the first failure counts
        if curve.status != "ok":
            row |= {"outcome": curve.status, "message": f"seed {seed}: {curve.message}"}
    found = {str(seed): curve.result or {} for seed, curve in curves.items()}
    first = next(iter(found.values()))
    row |= {name: first.get(name, []) for name in ("device_mib", "host_mib")}
    row["seconds"] = sum(curve.seconds for curve in curves.values())
    row["losses"] = {seed: one["losses"] for seed, one in found.items() if one.get("losses")}
    return row


def profile_step(cell: TrainCell, *, threads: int | None = None, **options: Any) -> Outcome:
    """Run `child.profile_cell` in a separate process; options: deadline_s, folder."""
    return run_child(PROFILE_ENTRY, {"cell": cell.to_dict(), "threads": threads}, **options)
