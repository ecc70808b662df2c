"""Cells of a memory table, and what the trial of each measures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import nan
from typing import Any

from nsa.spelling import choice
from workbook.lab.training import TrainingSpec, attention_named, longest_tokens


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
    dtype: str = "fp32",
    **fixed: Any,
) -> list[TrainingSpec]:
    """Make a cell for each preset, number of layers, backend and T, in that order; "dense" among
    the backends is the dense baseline.

    `longest` excludes T beyond a backend's limit: "sequential=256", or with a colon. `layers` may
    be empty: each preset's own number. `dtype` is their precision, "fp32" or "bf16"; `fixed` holds
    the other fields of every cell. Raises ValueError for anything illegal, before any cell runs,
    and for a grid without cells.
    """
    choice("dtype", dtype, ("fp32", "bf16"))
    most, same = longest_tokens(longest), fixed | {"precision": dtype}
    cells = [
        TrainingSpec(preset, length, layers=depth, **attention_named(backend), **same)
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
