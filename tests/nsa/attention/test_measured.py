"""`auto` by measurement: which shape counts as near, who changes places, and the table's writer."""

import json
from types import SimpleNamespace

import pytest
import torch
from cases import Case, draw

from nsa.attention import measured, registry
from nsa.attention.api import explain, nsa_attention
from nsa.attention.witness import recording
from nsa.config import NSAConfig

NAME = "02_backend_comparison-1234"
RUN = {"gpu": "NVIDIA H200", "compute_capability": "9.0", "date": "2026-11-21"}
NAMES = ["triton", "flash", "flex", "packed", "gather"]


SIZES = {"batch": 1, "kv_heads": 4, "dim": 128, "value_dim": 128, "dtype": "bfloat16"}
FLASH_FIRST = {"triton": 2.0, "flash": 1.0}


def row(tokens=8192, heads=64, forward=FLASH_FIRST, backward=None, run=NAME):
    latency = {"forward": forward, "backward": backward or {}}
    of = {"run": run, "tokens": tokens, "heads": heads, "config": {}, "latency_ms": latency}
    return SIZES | of


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Puts rows in the place of the table that is shipped."""
    caches = measured.rows, measured.nearest

    def use(*rows, other_gpu="NVIDIA H200"):
        path = tmp_path / "measured.json"
        runs = {NAME: RUN, "other": RUN | {"gpu": other_gpu}}
        path.write_text(json.dumps({"runs": runs, "rows": rows}))
        monkeypatch.setattr(measured, "TABLE", path)
        for cache in caches:
            cache.cache_clear()

    yield use
    for cache in caches:
        cache.cache_clear()


def near(tokens=8192, heads=64, batch=1, training=False, config=None, **changes):
    of = {"gpu": "NVIDIA H200", "capability": (9, 0), "dtype": "torch.bfloat16"} | changes
    of["sizes"] = (tokens, batch, heads, 4, 128, 128)
    return measured.nearest(**of, config=config or NSAConfig(), training=training)


def test_those_that_were_measured_change_places_and_the_others_keep_theirs():
    ranking = measured.Ranking({"packed": 1.0, "flash": 3.0, "triton": 2.0, "own": 0.1}, "")
    assert ranking.order(NAMES) == ["packed", "triton", "flex", "flash", "gather"]
    assert measured.Ranking({"packed": 1.0}, "").order(NAMES) == NAMES


def test_the_nearest_shape_in_powers_of_two_decides(table):
    table(
        row(8192),
        row(32768, forward={"triton": 8.0, "flash": 9.0}),
        row(2048, heads=12, forward={"triton": 0.1, "packed": 0.2}),
    )
    assert near(8192).latency_ms == {"triton": 2.0, "flash": 1.0}
    assert near(12_000).latency_ms["triton"] == 2.0
    assert near(20_000).latency_ms["triton"] == 8.0
    assert near(131_072).latency_ms["triton"] == 8.0
    assert near(131_073) is None and near(4096, heads=12).latency_ms["triton"] == 0.1
    assert near(2048, heads=6, batch=2).latency_ms["triton"] == 0.1  # heads are heads
    assert near(8192, config=NSAConfig(select_count=4)).latency_ms["triton"] == 2.0
    assert near(8192, config=NSAConfig(select_count=4, window=256)) is None


def test_only_the_gpu_s_architecture_and_a_dtype_of_the_same_width_count(table):
    table(row())
    assert near(gpu="NVIDIA H100 80GB HBM3").latency_ms["flash"] == 1.0
    assert near(dtype="torch.float16").latency_ms["flash"] == 1.0
    assert near(capability=(8, 0)) is None
    assert near(dtype="torch.float32") is None


def test_the_same_chip_comes_before_another_of_its_architecture(table):
    other = "NVIDIA H100 80GB HBM3"
    table(row(run="other"), row(forward={"triton": 1.0, "flash": 2.0}), other_gpu=other)
    assert near(gpu=other).latency_ms["flash"] == 1.0
    assert near().latency_ms["flash"] == 2.0


def test_training_is_ranked_by_forward_and_backward_together(table):
    forward = {"triton": 2.0, "flash": 1.0, "flex": 0.5}
    table(row(forward=forward, backward={"triton": 2.0, "flash": 4.0}))
    assert near(training=True).latency_ms == {"triton": 4.0, "flash": 5.0}
    assert str(near(training=True)) == (
        "measured on NVIDIA H200 (run 02_backend_comparison-1234) at T 8192, HQ 64, HKV 4, D 128, "
        "forward and backward: triton 4 ms, flash 5 ms"
    )
    assert "D 128, forward: flex 0.5 ms, flash 1 ms, triton 2 ms" in str(near())


def test_one_backend_alone_is_no_comparison(table):
    table(row(forward={"packed": 0.1}))
    assert near() is None


def claimed(**changes):
    """Inputs that claim to be on a GPU, as `ranking` looks at them."""
    where = {"is_cuda": True, "device": "cuda:0"}
    x = SimpleNamespace(**where, shape=(1, 8192, 64, 128), dtype=torch.bfloat16, requires_grad=True)
    tensors = {"q": x, "k": {"slc": x}, "v": {"slc": x}, "gates": x, "cu_seqlens": None}
    sizes = {"kv_heads": 4, "value_dim": 128, "config": NSAConfig(), "offset": False}
    return SimpleNamespace(**tensors, **sizes, branches=("cmp", "slc", "win"), **changes)


def test_a_call_is_ranked_by_its_sizes_and_whether_it_will_be_differentiated(table, monkeypatch):
    table(row(backward={"triton": 1.0, "flash": 4.0}))
    monkeypatch.setattr(measured, "_gpu", lambda device: ("NVIDIA H200", (9, 0)))
    assert measured.ranking(claimed()).order(["flash", "triton"]) == ["triton", "flash"]
    with torch.no_grad():
        assert measured.ranking(claimed()).order(["flash", "triton"]) == ["flash", "triton"]
    for name, value in (("branches", ("win",)), ("cu_seqlens", torch.zeros(2))):
        inputs = claimed()
        setattr(inputs, name, value)
        assert measured.ranking(inputs) is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert measured.ranking(claimed()) is None


def test_the_table_is_read_once_and_looked_up_once_a_shape(table, monkeypatch):
    table(row())
    monkeypatch.setattr(measured, "_gpu", lambda device: ("NVIDIA H200", (9, 0)))
    with torch.no_grad():
        first = measured.ranking(claimed())
        measured.TABLE.unlink()
        monkeypatch.setattr(measured, "rows", None)
        assert measured.ranking(claimed()) is first


def test_auto_takes_what_was_faster_and_says_so(monkeypatch):
    ranking = measured.Ranking({"packed": 2.0, "gather": 1.0, "flash": 0.5}, "a GPU at T 30")
    args, kwargs = draw(Case(30), torch.float32).arguments()
    assert registry.names().index("packed") < registry.names().index("gather")
    monkeypatch.setattr(measured, "ranking", lambda inputs: ranking)
    with recording() as seen:
        nsa_attention(*args, **kwargs)
    assert list(seen.backends) == ["gather"]
    why = explain(*args)
    assert why.startswith("auto takes gather:")
    assert "measured on a GPU at T 30: flash 0.5 ms, gather 1 ms, packed 2 ms" in why
    assert "flash declined: needs bf16 or fp16" in why and "packed declined" not in why


def test_the_table_that_is_shipped_can_be_read():
    measured.rows.cache_clear()
    for found in measured.rows():
        assert set(measured.SIZES) < set(found) and found["gpu"] and found["date"]
        assert NSAConfig(**found["config"])
        for direction, latency in found["latency_ms"].items():
            assert direction in measured.DIRECTIONS
            assert set(latency) <= set(registry.names()) and min(latency.values()) > 0
