"""The stored estimates of "does it fit?", and the sentence that the front page makes of them."""

import itertools

import pytest

from nsa.spelling import settings
from workbook.cli.estimate import spec_of
from workbook.runs.files import read_json
from workbook.runs.site import fits


def test_every_cell_is_stored_and_needs_grow_with_t_and_fall_with_recomputing():
    found = fits.table()
    of = {(row["size"], row["way"]): [c["gib"] for c in row["cells"]] for row in found["rows"]}
    assert set(of) == {(size, way) for size in fits.SIZES for way in fits.WAYS}
    for (size, way), needs in of.items():
        # what is reserved depends on how blocks fall into segments, so not to the last percent
        assert all(b > 0.99 * a for a, b in itertools.pairwise(needs)), (size, way)
        assert len(needs) == len(fits.TOKENS)
        assert all(a <= b for a, b in zip(of[size, "layers recomputed"], needs, strict=True))
    assert all(c["least"] <= c["gib"] for row in found["rows"] for c in row["cells"])


def test_models_have_the_parameters_that_their_names_say():
    for row in fits.table()["rows"]:
        billions = row["cells"][0]["parameters"] / 1e9
        assert float(row["size"].rstrip("B")) == pytest.approx(billions, rel=0.03), row["size"]


def test_the_longest_t_that_fits_follows_from_the_memory_that_is_there():
    for gib in (10.0, 80.0, 141.0):
        for row in fits.table(gib)["rows"]:
            fit = [c["tokens"] for c in row["cells"] if c["gib"] <= gib]
            assert row["largest"] == (fits.length(max(fit)) if fit else "none")
    assert {row["largest"] for row in fits.table(1.0)["rows"]} == {"none"}


@pytest.mark.parametrize("size", fits.SIZES)
def test_the_command_of_a_cell_is_one_that_nsa_estimate_takes(size):
    line = fits.command(size, "layers recomputed", 4096, "--fits 80")
    words = line.removeprefix("nsa estimate ").removesuffix(" --fits 80").split()
    spec = spec_of(settings(words, "tokens=2048"))
    assert (spec.tokens, spec.precision, spec.device) == (4096, "bf16", "cuda")
    assert spec.config().checkpoint == "all" and spec.preset == "production"


def test_the_front_page_says_if_a_model_fits_and_what_it_needs():
    said = fits.answer()
    assert said["fits"] == "fits" and 40 < float(said["asked"]["text"]) < 60
    assert fits.answer(40.0)["fits"] == "does not fit"


@pytest.mark.slow
def test_a_stored_cell_is_what_an_estimate_gives_today():
    stored = read_json(fits.FILE)["cells"][0]
    today = fits.cell(stored["size"], stored["way"], stored["tokens"])
    assert today["parameters"] == stored["parameters"]
    for name in ("allocated", "needs"):
        assert today[name] == pytest.approx(stored[name], rel=0.02)
