"""The cells of a sweep, and the case study's figures beside them."""

import pytest

from nsa.experiments.case_study import figures as case_study
from nsa.experiments.memory.cell import limits, memory_grid


def test_a_grid_is_every_combination_in_order():
    cells = memory_grid(["repro", "smoke"], [1, 2], ["gather", "masked"], [64, 128], dtype="bf16")
    assert len(cells) == 16
    assert [c.tokens for c in cells[:2]] == [64, 128]
    assert [(c.preset, c.layers, c.backend) for c in cells[::2]][:3] == [
        ("repro", 1, "gather"),
        ("repro", 1, "masked"),
        ("repro", 2, "gather"),
    ]
    assert {c.dtype for c in cells} == {"bf16"}


def test_no_layers_mean_each_presets_own_number():
    (cell,) = memory_grid(["production"], [], ["gather"], [64])
    assert cell.layers is None and cell.config().layers == 12


def test_a_backend_can_be_kept_out_of_long_sequences():
    cells = memory_grid(["repro"], [1], ["sequential", "gather"], [64, 128, 256],
                        longest=["sequential=128"])  # fmt: skip
    assert [(c.backend, c.tokens) for c in cells] == [
        ("sequential", 64), ("sequential", 128), ("gather", 64), ("gather", 128), ("gather", 256),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((f"sequential{end}", "sequential=256") for end in ("", ":", ":-5", ":0")),
        ("=5", "sequential=256"),
        ("gathr:3", "the nearest is 'gather'"),
    ],
)
def test_a_limit_of_another_form_or_on_no_backend_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        limits([text])


@pytest.mark.parametrize(
    ("preset", "backends", "longest", "message"),
    [
        ("repro", [], [], "no cell to measure"),
        ("repro", ["gather"], ["gather:32"], "no cell to measure"),
        ("reprro", ["gather"], [], "repro"),
    ],
)
def test_a_grid_without_cells_or_with_an_illegal_one_is_refused(preset, backends, longest, message):
    with pytest.raises(ValueError, match=message):
        memory_grid([preset], [1], backends, [64], longest=longest)


def test_the_case_studys_estimator_is_off_by_what_the_study_found():
    error = {t: case_study.ESTIMATE_MIB[t] / m - 1 for t, m in case_study.MEMORY_MIB.items()}
    assert error[128] == pytest.approx(-0.526, abs=0.002)
    assert error[512] == pytest.approx(-0.712, abs=0.002)
    assert error[1024] == pytest.approx(-0.542, abs=0.002)
    assert error[2048] == pytest.approx(0.051, abs=0.001)
