"""Cells of a memory table: a model, a backend and a size each, checked before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from math import nan
from typing import TYPE_CHECKING, Any

from nsa.spelling import choice
from workbook.lab.training import TrainingSpec, longest_tokens

if TYPE_CHECKING:
    from nsa.model.config import ModelConfig


@dataclass(frozen=True)
class Cell:
    """One training step to measure. Raises ValueError for anything that cannot be run."""

    preset: str
    backend: str
    tokens: int
    layers: int | None = None  # None: the preset's own number
    batch: int = 1
    dtype: str = "fp32"  # "bf16" is autocast over fp32 weights
    checkpoint: str = ""  # layers that are recomputed in the backward, see ModelConfig
    device: str = "cpu"
    seed: int = 1337
    data: str = "text"  # the standard library's sources, or "synthetic"
    changes: dict[str, Any] = field(default_factory=dict)  # further fields of ModelConfig

    def __post_init__(self) -> None:
        choice("dtype", self.dtype, ("fp32", "bf16"))
        self.spec()

    def spec(self) -> TrainingSpec:
        """Training whose step is measured. ValueError for what cannot be run."""
        values = asdict(self)
        return TrainingSpec(precision=values.pop("dtype"), **values)

    def config(self) -> "ModelConfig":
        return self.spec().config()

    def __str__(self) -> str:
        batch = f" batch {self.batch}" * (self.batch != 1)
        return self.spec().told(self.backend, f"T={self.tokens} {self.dtype} {self.device}{batch}")


@dataclass(frozen=True)
class Measured:
    """Measurements of a cell's trial, for the recorded step unless noted otherwise; sizes in MiB.

    NaN, empty or None if it failed.
    """

    parameters: float = nan
    step_ms: float = nan  # median of the unobserved steps
    recorded_s: float = nan
    peak_mib: float = nan
    reserved_mib: float = nan  # by CUDA's allocator
    first_step_peak_mib: float = nan  # of the warm-up, on a GPU
    data_mib: float = nan  # the peak of each phase
    forward_mib: float = nan
    backward_mib: float = nan
    optimizer_mib: float = nan
    by_category_mib: dict = field(default_factory=dict)  # at the peak
    by_phase_category_mib: dict = field(default_factory=dict)  # at each phase's peak
    held_mib: dict = field(default_factory=dict)  # when the forward ends
    timeline: dict = field(default_factory=dict)  # of its events, see lab.measure.allocations
    cross_check: dict = field(default_factory=dict)  # the peak by an independent count
    losses: list = field(default_factory=list)  # of every step
    step_ms_each: list = field(default_factory=list)
    witness: dict | None = None  # implementation that served each branch
    model: dict | None = None  # ModelConfig.to_dict()
    device_name: str = ""
    torch: str = ""
    threads: int | None = None  # torch's, on the CPU


def memory_grid(
    presets: Sequence[str],
    layers: Sequence[int],
    backends: Sequence[str],
    tokens: Sequence[int],
    *,
    longest: Sequence[str] = (),
    **fixed: Any,
) -> list[Cell]:
    """Make a cell for each preset, number of layers, backend and T, in that order.

    `longest` excludes T beyond a backend's limit: "sequential=256", or with a colon. `layers` may
    be empty: each preset's own number. `fixed` holds the other fields of every cell. Raises
    ValueError for anything illegal, before any cell runs, and for a grid without cells.
    """
    most = longest_tokens(longest)
    cells = [
        Cell(preset=preset, layers=depth, backend=backend, tokens=length, **fixed)
        for preset, depth, backend, length in product(presets, layers or [None], backends, tokens)
        if length <= most.get(backend, length)
    ]
    if not cells:
        raise ValueError(
            f"no cell to measure: presets={list(presets)}, backends={list(backends)}, "
            f"tokens={list(tokens)}, longest={list(longest)}"
        )
    return cells


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise ValueError for notebook parameters that cannot be run."""
    names = ("presets", "layers", "backends", "tokens", "longest", "batch", "dtype", "checkpoint")
    memory_grid(**{name: values[name] for name in names})
