"""Estimates of a decode step from its bytes, and the check of a step before it is timed."""

from dataclasses import replace

import pytest
import torch

from nsa.attention.decode import nsa_decode
from nsa.model.reads import keys_read
from workbook.lab.measure.accuracy import AccuracyError
from workbook.lab.measure.shapes import TINY_CONFIG
from workbook.rooms.decode import cells, check, child
from workbook.rooms.decode.cells import Cell

CPU = torch.device("cpu")


def tiny(tokens=80, batch=2, shared=False):
    return Cell(batch, tokens, 4, 2, 8, "fp32", shared, config=TINY_CONFIG)


def rows(cell, **changes):
    chosen = {"backends": ["gather"], "pages": [16], "dense": True, "peers": []} | changes
    spec = {"cell": cell.to_dict(), "device": "cpu", "threads": 1, **chosen}
    return child.measure_cell(spec)["rows"]


@pytest.mark.parametrize("config", [TINY_CONFIG, Cell(1, 64).config], ids=["tiny", "usual"])
def test_the_keys_of_a_step_are_those_that_the_counters_count(config):
    for tokens in (33, 64, 65, 511, 512, 513, 1023, 1024, 1025, 4099):
        lengths = torch.tensor([tokens - 1, tokens])
        before, after = keys_read(lengths, config).tolist()
        keys = Cell(1, tokens, config=config).keys
        assert [keys[b] for b in cells.BRANCHES] == [
            y - x for x, y in zip(before, after, strict=True)
        ]


def test_at_the_papers_lengths_a_step_reads_what_the_paper_says_but_for_one_key():
    assert {t: Cell(1, t).nsa_keys + 1 for t in cells.PAPER} == cells.PAPER
    one = Cell(1, 65536)
    assert one.bytes_read("dense") / one.bytes_read() == pytest.approx(11.64, abs=0.005)
    assert one.bytes_read("dense") == one.dense_bytes == 65536 * 4 * 256 * 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], "no sizes; write some as 32x64k"),
        (["64k"], "'64k' is no size"),
        (["1xk"], "no number of tokens"),
        (["0x64"], "batch=0 must be"),
        (["1x32"], "tokens=32 are too few to compress; at least 33"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        cells.cells_from(sizes)


def test_sizes_are_sequences_by_tokens_and_survive_a_childs_spec():
    found = cells.cells_from(["1x8k", "32x64k", "1 x 8192"], heads=8, kv_heads=2)
    assert [str(one) for one in found] == ["1 x 8k", "32 x 64k"]
    assert [Cell.from_dict(one.to_dict()) for one in found] == found


@pytest.mark.full
@pytest.mark.parametrize("shared", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_step_is_right_takes_the_memory_estimated_and_reads_its_keys_alone(shared):
    cell = tiny(shared=shared)
    plain, paged, dense = rows(cell)
    for row in (plain, paged, dense):
        assert (row["outcome"], row["message"]) == ("ok", "")
        assert row["cache_bytes"] == row["foretold_bytes"]
        assert row["ms"]["eager"][0] > 0 and row["error"][0] <= row["error"][1]
    for row in (plain, paged):
        keys = {branch: cell.keys[branch] for branch in cells.BRANCHES}
        assert row["reads"] | {"spoilt": 0} == {
            "keys": keys,
            "spoilt": 0,
            "same": True,
            "seen": True,
        }
        assert row["reads"]["spoilt"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.long)])
def test_our_kernels_are_right_and_read_their_keys_alone(shared, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(child, "_time", lambda row, steps, device: None)
    cell = replace(tiny(shared=shared), dim=16)
    [row] = rows(cell, backends=["triton"], pages=[], dense=False)
    assert (row["outcome"], row["message"]) == ("ok", "")
    assert row["reads"]["same"] and row["reads"]["seen"] and row["reads"]["spoilt"]


def test_who_loads_keys_that_it_masks_is_told_from_who_does_not(monkeypatch):
    monkeypatch.setattr(child, "ONLY_THEIR_OWN", ("masked",))
    [row] = rows(tiny(), backends=["masked"], pages=[], dense=False)
    assert row["outcome"] == "ok" and not row["reads"]["same"]


WRONG = {
    "an output 1 % too large": lambda o, cache: o.mul_(1.01),
    "nothing": lambda o, cache: o.zero_(),
    "a key that is not stored": lambda o, cache: cache._flat["k_slc"].zero_(),
    "a ring that is not stored": lambda o, cache: cache._flat["v_win"].zero_(),
    "a compressed value off by a hundredth": lambda o, cache: cache._flat["v_cmp"].mul_(1.01),
}


@pytest.mark.full
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_step_gets_no_time(case, monkeypatch):
    def spoilt(*args, **options):
        o = nsa_decode(*args, **options)
        WRONG[case](o, args[4])
        return o

    monkeypatch.setattr(child, "nsa_decode", spoilt)
    [row] = rows(tiny(), pages=[], dense=False)
    assert (row["outcome"], row["ms"]) == ("red", {}) and row["message"]


@pytest.mark.full
def test_who_does_not_run_leaves_its_reason_and_the_others_run(monkeypatch):
    monkeypatch.setattr(child, "_dense", lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
    found = rows(tiny(), backends=["forward", "gather"], pages=[], peers=["no.where:f"])
    assert [row["outcome"] for row in found] == ["declined", "ok", "error", "declined"]
    assert "needs an empty cache" in found[0]["message"]
    assert found[2]["message"] == "RuntimeError: boom"
    assert "no.where:f cannot be imported" in found[3]["message"]


@pytest.mark.full
def test_a_peer_is_called_with_the_cache_and_checked(monkeypatch):
    seen = []

    def peer(q, k, v, gates, cache):
        seen.append(cache.shape)
        return nsa_decode(q, k, v, gates, cache, backend="masked", advance=False)

    monkeypatch.setattr("pkgutil.resolve_name", lambda path: peer)
    [row] = rows(tiny(), backends=["reference"], pages=[], dense=False, peers=["a:b"])[1:]
    assert (row["name"], row["outcome"]) == ("peer a:b", "ok") and seen[0] == tiny().shape()


def test_rows_whose_selection_rounding_could_change_are_not_compared():
    cell = tiny()
    new, cache = check.new_token(cell, CPU), check.filled(cell, None, CPU, 1)
    cache.append(new.k, new.v, advance=False)
    true = check.truth(cell, new, cache, 1e9)
    assert not true.clear.any()
    with pytest.raises(AccuracyError, match="no row of the sample"):
        check.hold(cell, "x", torch.zeros(2, 1, 4, 8), true)
