"""Activations from shapes against the allocator: every backend, without a fitted number."""

from dataclasses import asdict

import pytest

from nsa.model.presets import preset
from workbook.lab.measure.activation_model import activations, predicted_peak
from workbook.lab.training import TrainingSpec
from workbook.rooms.memory.trials import measure_cell

CELLS = [
    TrainingSpec("repro", 512, backend="gather", layers=2),
    TrainingSpec("repro", 512, backend="packed", layers=1),
    TrainingSpec("repro", 384, backend="masked", layers=2),
    TrainingSpec("repro", 384, backend="masked", layers=1, precision="bf16"),
    TrainingSpec("repro", 512, backend="sdpa", layers=1),
    TrainingSpec("repro", 512, backend="sdpa:math", layers=1),
    TrainingSpec("repro", 512, backend="sdpa:math", layers=1, precision="bf16"),
    TrainingSpec("repro", 256, backend="packed", layers=2, precision="bf16"),
    TrainingSpec("repro", 96, backend="sequential", layers=1),
    TrainingSpec("smoke", 256, backend="gather", layers=1, batch=2),
]


@pytest.mark.full
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_activations_are_those_that_the_allocator_saw_and_no_peak_is_below_them(
    cell, nothing_before
):
    """One recorded step in this process; no seconds are left to time another one."""
    row = measure_cell({"cell": asdict(cell), "deadline_s": 0.0, "threads": 1})
    shape = cell.config(), cell.tokens, cell.batch, cell.precision, cell.backend
    assert "declined" not in row, row
    kept_mib, least_mib = activations(*shape).total / 2**20, predicted_peak(*shape) / 2**20
    assert kept_mib == pytest.approx(row["held_mib"]["activations"], rel=0.15)
    assert row["peak_mib"] * 1.05 >= least_mib


@pytest.mark.parametrize(
    ("preset_", "layers", "tokens", "backend", "mib"),
    [  # at the peak on an H200, of runs/2026-11-28/memory_activations-02229cbb.jsonl
        ("repro", 12, 2048, "triton", 209.93),
        ("repro", 12, 8192, "triton", 828.76),
        ("repro", 5, 2048, "triton", 89.72),
        ("production", 12, 2048, "triton", 956.97),
        ("production", 5, 8192, "triton", 1331.87),
        ("repro", 5, 2048, "gather", 51.65),
        ("production", 5, 8192, "gather", 1206.47),
        ("production", 12, 8192, "gather", 3203.94),
        ("production", 5, 2048, "packed", 382.62),
    ],
)
def test_activations_are_those_of_a_gpu(preset_, layers, tokens, backend, mib):
    kept = activations(preset(preset_, layers=layers), tokens, 1, "bf16", backend)
    assert kept.nearest(mib * 2**20) / 2**20 == pytest.approx(mib, rel=0.13)
    if backend == "triton":  # its values have 64 columns at least, of 16 here
        assert kept.total / 2**20 == pytest.approx(mib, rel=0.05)


def test_only_dense_masks_have_a_quadratic_part():
    config = preset("repro")
    for backend in ("gather", "packed", "flex"):
        one, two = (activations(config, t, backend=backend) for t in (4096, 8192))
        assert one.quadratic == two.quadratic == 0
        assert two.linear == 2 * one.linear
    for backend in ("masked", "sdpa", "sdpa:math"):
        one, two = (activations(config, t, backend=backend) for t in (4096, 8192))
        assert two.quadratic == pytest.approx(4 * one.quadratic, rel=1e-3)


def test_auto_is_no_one_program():
    with pytest.raises(ValueError, match="'auto' is a choice"):
        activations(preset("repro"), 64)
