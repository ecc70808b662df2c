"""The cells of a throughput table: trainings, for how many steps, from lists of what is varied."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import nan
from typing import Any

from nsa.lab.training import TrainingSpec, check_switch, check_whole, open_trainer
from nsa.spelling import nearest, pair

DENSE = "dense"
DATA_SEED = 1337
LEAST_WARMUP = 3  # steps 0 to 2: kernels are compiled, optimizer state is made, buckets are rebuilt
SWITCHES = ("compile", "cuda_graph", "observe")
TOLD = ("attention", "backend", "tokens")  # by a cell's name and T, wherever it is shown


@dataclass(frozen=True)
class TrainCell(TrainingSpec):
    """A training of `warmup` steps that nobody times and `steps` that are timed.

    The data are the same for every seed. Raises ValueError for anything that could not be run.
    """

    observe: bool = False  # what all observers together cost is measured too, after the steps
    warmup: int = LEAST_WARMUP
    steps: int = 20
    variant: str = ""  # how `with_` made this cell of another

    def __post_init__(self) -> None:
        check_whole(self, {"warmup": LEAST_WARMUP, "steps": 2})
        check_switch(self, "observe")
        if self.observe and (self.compile or self.cuda_graph):
            raise ValueError("observe hooks modules, which compile and cuda_graph leave out")
        super().__post_init__()

    @property
    def name(self) -> str:
        """What its line is called: the backend; the twin is "dense", or "dense-sdpa"."""
        if self.attention == "nsa":
            return self.backend
        return DENSE if self.backend == "auto" else f"{DENSE}-{self.backend}"

    def opened(self, threads: int | None = None, **changes: Any):
        """`open_trainer` with batches that are the same for every seed and drawn ahead."""
        return open_trainer(self, threads=threads, data_seed=DATA_SEED, prefetch=True, **changes)

    def with_(self, text: str) -> "TrainCell":
        """A copy with the fields that words name: "compile", "checkpoint=all batch=1".

        "attention=dense backend=auto" makes the twin of it. Its variant is the words but for TOLD.

        ValueError for a field that a cell does not have, naming the nearest.
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


@dataclass(frozen=True)
class Measured:
    """What one rank measured, of the timed steps unless it says otherwise; a row has the job's.

    NaN, empty or None where it did not end well, or where there was nothing to measure.
    """

    tokens_s: float = nan  # of the whole job, by the device's own clock
    recount_tokens_s: float = nan  # by the wall clock, from an idle device to an idle device
    step_ms: float = nan  # the median
    step_ms_q20: float = nan
    step_ms_q80: float = nan
    step_ms_each: list = field(default_factory=list)
    phase_ms: dict = field(default_factory=dict)  # of steps watched after the timed ones
    communication_ms: float = nan  # DDP's; FSDP2 and a CUDA graph do not go on without sending
    loader_wait_ms: float = nan  # a step's mean
    peak_mib: float = nan  # of a CUDA graph since the process began: what it took, it keeps
    device_mib: list = field(default_factory=list)  # after each step
    host_mib: list = field(default_factory=list)
    recompilations: float = nan
    syncs: int | None = None  # the host's waits in one step; None without a GPU
    losses: list = field(default_factory=list)  # of the warm-up, too
    parameters: float = nan
    matmul_tflops: float = nan  # measured on this device
    nominal_tflops: float = nan
    watched_ms: float = nan  # a step with all observers, of a cell that asks for it
    unwatched_ms: float = nan
    watched_times: float = nan
    paths: dict = field(default_factory=dict)  # which implementations served a branch
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
    """The cells, in the order of what they decide, for what comes last may find no time.

    First the first of `backends` and its dense twin at each of `tokens`, then `long_backends` at
    each of `long_tokens`, then ranks and variants, last the other backends. "dense" among the
    backends is the dense twin. A step has `step_tokens` tokens where T divides them, else one
    sequence. `variants`, see `TrainCell.with_`, change the first backend at the first T; so does
    each number of ranks above 1, with each kind of `parallel` and as many times the batch.

    ValueError for anything illegal, before any cell runs, and for a grid without cells.
    """

    def plain(name: str, length: int) -> TrainCell:
        dense = {"attention": "dense", "backend": "auto"} if name == DENSE else {"backend": name}
        batch = max(1, step_tokens // length)
        return TrainCell(preset=preset, tokens=length, batch=batch, **dense, **fixed)

    deciding = [name for name in backends if name in (backends[0], DENSE)]
    pairs = dict.fromkeys([*product(tokens, deciding), *product(long_tokens, long_backends)])
    cells = [plain(name, length) for length, name in pairs]
    if not cells:
        raise ValueError(f"no cell to measure: backends={backends}, tokens={tokens}")
    first = cells[0]
    for count, kind in product([count for count in ranks if count != 1], parallel):
        cells.append(first.with_(f"batch={count * first.batch} ranks={count} parallel={kind}"))
    cells += [first.with_(text) for text in variants]
    others = [pair for pair in product(tokens, backends) if pair not in pairs]
    return cells + [plain(name, length) for length, name in dict.fromkeys(others)]


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
    """One cell a backend, "dense" being the twin; none where `steps` is 0. `variant` is of all."""
    if not steps:
        return []
    cells = throughput_grid(preset, backends, [tokens], step_tokens=batch * tokens, **fixed)
    return [replace(cell, steps=max(steps, LEAST_WARMUP)).with_(variant) for cell in cells]
