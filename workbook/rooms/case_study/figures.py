"""Figures that the case study reported: every name of figures.yaml, and values derived from them.

The case study is a public PyTorch implementation of NSA and five reports on it of August 2025.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from workbook.runs import parameters

_told = parameters.read_file(Path(__file__).with_name("figures.yaml"))
globals().update(_told)
ESTIMATOR, MEMORY_MIB = _told["ESTIMATOR"], _told["MEMORY_MIB"]
STATED = frozenset(_told["STATED"])
PER_LAYER = {(design, tokens): count for design, counts in _told["PER_LAYER"].items()
             for tokens, count in counts.items()}  # fmt: skip
# (layers, T) -> MiB: from the memory table, and from the 12-layer run.
PEAKS_MIB = {(5, tokens): mib for tokens, mib in MEMORY_MIB.items()}
PEAKS_MIB[12, 2048] = _told["PRODUCTION_PEAK_MIB"]


def estimate_mib(tokens, estimator=ESTIMATOR):
    """Memory by the report's estimator, MiB, for a number or an array of tokens."""
    constant, slope = estimator
    return constant + slope * tokens**2


ESTIMATE_MIB = {tokens: estimate_mib(tokens) for tokens in MEMORY_MIB}


@dataclass(frozen=True)
class Timing:
    """A step's seconds as the case study reported them."""

    gpu: str
    design: str
    layers: int
    tokens: int
    seconds: float
    said: str

    @property
    def operations(self) -> int:
        return self.layers * PER_LAYER[self.design, self.tokens]

    @property
    def microseconds(self) -> float:
        """Microseconds per operation."""
        return 1e6 * self.seconds / self.operations

    def __str__(self) -> str:
        layers = f"{self.layers} layer{'s' if self.layers > 1 else ''}"
        return f"{layers}, T {self.tokens}, {self.gpu}"


TIMINGS = tuple(Timing(*row) for row in _told["TIMINGS"])
OTHER_TIMINGS = tuple(Timing(*row) for row in _told["OTHER_TIMINGS"])
ALL_TIMINGS = TIMINGS + OTHER_TIMINGS


def held_out_us(each) -> list[float]:
    """Leave-one-out constants: for each value, in microseconds an operation, the geometric mean of
    all others."""
    logs = [math.log(us) for us in each]
    return [math.exp((sum(logs) - log) / (len(logs) - 1)) for log in logs]


HELD_OUT_US = dict(
    zip(ALL_TIMINGS, held_out_us([t.microseconds for t in ALL_TIMINGS]), strict=True)
)
# How far each known step is off its prediction by the constant of all others.
OFF = {timing: us / timing.microseconds - 1 for timing, us in HELD_OUT_US.items()}
