"""Spelling of limits, refusals, and when a loss is flat."""

import math

import pytest
import torch

from workbook.lab.observers.guard_rules import Level, check_memory, flat, flat_told, levels


def test_a_guard_has_limits_with_their_actions_or_the_usual_one():
    usual = levels([])
    assert usual["flat"] == (Level(500.0, "warn"),) and usual["zero"] == (Level(3.0, "warn"),)
    assert usual["memory"] == ()
    given = levels(["memory=60GiB:warn, 65GiB:stop", "flat=stop", "zero=off", "collapse=0.5:stop"])
    assert given["memory"] == (Level(60 * 1024.0, "warn"), Level(65 * 1024.0, "stop"))
    assert given["flat"] == (Level(500.0, "stop"),)
    assert given["zero"] == () and given["collapse"] == (Level(0.5, "stop"),)
    assert levels(["memory=off"])["memory"] == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memroy=1GiB:stop", "guard='memroy' is unknown; known are flat, collapse, zero, memory"),
        ("memory", "is not of the form name=value, as in --guard memory=60GiB:warn,65GiB:stop"),
        ("memory=stop", "needs a limit, as in --guard memory=60GiB"),
        ("memory=60GB:stop", "'60GB' is no size of memory; write 60GiB or 512MiB"),
        ("memory=60:stop", "'60' is no size of memory"),
        ("memory=0GiB:stop", "'0GiB' is no size of memory"),
        ("flat=halt", "'halt' is no action; warn, stop and off are"),
        ("flat=", "'' is no action"),
        ("flat=5:stop", "must be a number .steps without a lower loss. of at least 20"),
        ("collapse=2:stop", "of at least 0 and at most 1"),
        ("zero=soon:stop", "the limit 'soon' must be a number"),
    ],
)
def test_what_is_no_guard_is_refused_with_what_would_do(text, message):
    with pytest.raises(ValueError, match=message):
        levels([text])


def test_a_limit_above_the_devices_memory_is_refused():
    found = levels(["memory=60GiB:warn,90GiB:stop"])["memory"]
    check_memory(found, 141 * 1024.0, "the GPU")
    with pytest.raises(ValueError, match=r"memory=90 GiB:stop can never .*: the GPU has 79\.5 GiB"):
        check_memory(found, 79.5 * 1024, "the GPU")


def noisy(seed, slope, steps=100, noise=0.1):
    drawn = torch.randn(steps, generator=torch.Generator().manual_seed(seed))
    return [5.0 + slope * step + noise * x for step, x in enumerate(drawn.tolist())]


def test_a_loss_is_flat_where_it_does_not_fall_beyond_its_noise():
    still = [flat(noisy(seed, 0.0)) is not None for seed in range(40)]
    falling = [flat(noisy(seed, -0.002)) is not None for seed in range(40)]
    rising = [flat(noisy(seed, 0.002)) is not None for seed in range(40)]
    assert sum(still) > 25 and sum(falling) < 4 and all(rising)
    assert flat([1.0] * 20) == (1.0, 1.0)
    assert flat([x - 0.001 * step for step, x in enumerate([1.0] * 20)]) is None
    odd = [5.0 - 0.01 * step for step in range(40)]
    odd[35] = 500.0
    assert flat(odd) is None, "one odd batch decides nothing"


def test_flat_at_the_loss_of_a_guess_is_named_as_that():
    assert "flat at ln 256 = 5.5452, the loss of a guess" in flat_told(5.55, 5.54, 500, 256)
    assert "ln" not in flat_told(3.2, 3.2, 500, 256)
    assert math.isclose(float(flat_told(3.2, 3.2, 500, 256).split("(")[1][:6]), 3.2)
