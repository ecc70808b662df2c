"""Estimates from the outside: reserved memory, small real runs, and the largest that fits."""

from dataclasses import replace

import pytest

from workbook.lab import sequential
from workbook.lab.estimate import search, trace
from workbook.lab.estimate.estimate import estimate, largest
from workbook.lab.estimate.gpus import gpu_named
from workbook.lab.measure.recorders import MIB
from workbook.lab.training import TrainingSpec

GIB = 2**30
SPEC = TrainingSpec("cpu_test", 128, attention="dense", backend="sdpa", layers=1)
ON_GPU = replace(SPEC, device="cuda", precision="bf16")


def test_categories_add_up_and_only_a_gpu_reserves():
    ours, theirs = estimate(SPEC), estimate(ON_GPU)
    assert sum(ours.by_category.values()) == ours.allocated == ours.phases[ours.phase]
    assert (ours.reserved, ours.gpu, ours.how) == (None, "", "traced")
    assert theirs.allocated <= theirs.reserved
    assert theirs.reserved % (2 * MIB) == 0
    assert theirs.by_category["resident"] >= 65 * MIB  # cuBLAS's workspaces of an H200


def test_on_a_gpu_that_nobody_calibrated_the_workspaces_are_uncertain():
    known, other = estimate(ON_GPU), estimate(ON_GPU, gpu="A100-SXM4-80GB")
    assert (known.calibrated, known.uncertainty) == (True, 0.0)
    workspaces = 2 * (8 * MIB + 128 * 1024)  # what torch gives cuBLAS before Hopper
    assert not other.calibrated
    assert other.uncertainty == pytest.approx(workspaces / other.allocated)


def test_settings_of_the_allocator_change_what_is_reserved():
    with pytest.raises(ValueError, match="no setting"):
        estimate(ON_GPU, allocator="split_size:1")
    plain, expandable = (
        estimate(ON_GPU, allocator=text) for text in ("", "expandable_segments:True")
    )
    assert plain.reserved != expandable.reserved
    assert plain.allocated == pytest.approx(expandable.allocated, rel=0.02)


def test_what_needs_a_value_is_refused_with_its_name(monkeypatch):
    monkeypatch.setattr(trace, "newest", sequential.chosen)
    spec = replace(SPEC, attention="nsa", backend="sequential", tokens=8)
    with pytest.raises(RuntimeError, match=r"_local_scalar_dense.* needs a value.*'sequential'"):
        estimate(spec)


def test_the_largest_fits_and_the_next_does_not():
    found = largest(SPEC, "tokens", 0.06)
    assert found.does_not == found.fits + 64
    assert found.at.allocated <= 0.06 * GIB < found.beyond.allocated
    assert found.at == estimate(replace(SPEC, tokens=found.fits))
    assert found.looks <= 6


def test_the_largest_batch_on_a_gpu_leaves_room_for_its_context():
    found = largest(ON_GPU, "batch", 1.0)
    context = gpu_named("NVIDIA H200").context
    assert found.does_not == found.fits + 1
    assert found.at.allocated <= GIB - context
    assert estimate(replace(ON_GPU, batch=found.does_not)).reserved > GIB - context


def test_all_may_fit_and_nothing_may():
    few = replace(SPEC, changes={"max_tokens": 200})
    assert (largest(few, "tokens", 4).fits, largest(few, "tokens", 4).does_not) == (192, None)
    with pytest.raises(ValueError, match=r"cannot hold the training at any size: .* 0\.00 GiB"):
        largest(SPEC, "tokens", 0.003)
    assert largest(replace(SPEC, batch=16), "tokens", 0.007).fits == 0
    with pytest.raises(ValueError, match="what='layers'"):
        largest(SPEC, "layers", 1)


@pytest.mark.parametrize("edge", [1, 2, 63, 1000, 123_456])
def test_a_boundary_is_found_where_needs_have_a_kink(edge):
    looks = []

    def look(size):
        looks.append(size)
        return max(100 + size, 40 + 3 * size + size * size / 1e4), size <= edge

    low, high = search.boundary(look, 1e9, start=8)
    assert low <= edge < high
    assert high - low <= max(1, search.CLOSE * low)
    assert len(looks) < 40
    assert search.boundary(lambda size: (size, True), 1e9, 8, most=50) == (50, None)
    assert search.boundary(lambda size: (size, False), 1e9, 8, most=50) == (0, 1)
