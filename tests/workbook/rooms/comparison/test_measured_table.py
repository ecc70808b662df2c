"""The writer of the table that `auto` goes by: which rows of a run it takes, and what it makes."""

import json

import pytest

pytest.importorskip("pandas")

from nsa.attention import measured
from nsa.config import NSAConfig
from workbook.lab.measure.limits import Ceilings
from workbook.lab.measure.shapes import Shape
from workbook.rooms.comparison import record
from workbook.rooms.comparison.cell import empty
from workbook.rooms.comparison.implementations import of_backends
from workbook.runs.store import Run

GPU = {"name": "NVIDIA H200", "memory_gib": 140.4, "compute_capability": "9.0", "driver": "580"}
SHAPE = {
    "batch": 1, "heads": 64, "kv_heads": 4, "dim": 128, "value_dim": 128, "dtype": "bf16",
    "queries": "random", "shared_kv": True, "window": 256, "outcome": "ok",
}  # fmt: skip


def latency(backend, median, mode="forward", tokens=8192, config=None, **changes):
    row = {"operation": "nsa_attention", "metric": "latency", "unit": "ms", "x_name": "tokens"}
    row |= {"backend": backend, "mode": mode, "x_value": tokens, "median": median}
    return row | {"config": SHAPE | (config or {})} | changes


@pytest.fixture
def run(tmp_path):
    def make(*rows, gpus=(GPU,), name="02_backend_comparison-1234"):
        folder = tmp_path / name
        folder.mkdir()
        environment = {"gpus": list(gpus), "git": {"commit": "abcdef"}, "torch": "2.11.0"}
        (folder / "environment.json").write_text(json.dumps(environment))
        Run(folder).add_rows([row | {"device": GPU["name"]} for row in rows])
        return folder

    yield make
    measured.rows.cache_clear()
    measured.nearest.cache_clear()


def test_latencies_of_backends_become_rows_that_the_lookup_finds(run, tmp_path, monkeypatch):
    folder = run(
        latency("triton", 2.0),
        latency("flash", 3.0),
        latency("triton", 5.0, "backward"),
        latency("triton", 7.0, tokens=32768),
    )
    path = tmp_path / "measured.json"
    table = record.write_measured([folder], path)
    assert json.loads(path.read_text()) == table
    facts = table["runs"][folder.name]
    assert facts["gpu"] == "NVIDIA H200" and facts["compute_capability"] == "9.0"
    assert facts["commit"] == "abcdef" and facts["date"]
    assert [row["tokens"] for row in table["rows"]] == [8192, 32768]
    assert table["rows"][0]["latency_ms"] == {
        "forward": {"triton": 2.0, "flash": 3.0},
        "backward": {"triton": 5.0},
    }
    assert NSAConfig(**table["rows"][0]["config"]) == NSAConfig(window=256)
    monkeypatch.setattr(measured, "TABLE", path)
    measured.rows.cache_clear()
    measured.nearest.cache_clear()
    sizes = (8192, 1, 64, 4, 128, 128)
    found = measured.nearest(
        "NVIDIA H200", (9, 0), "torch.bfloat16", sizes, NSAConfig(window=256), False
    )
    assert found.latency_ms == {"triton": 2.0, "flash": 3.0} and folder.name in str(found)


def test_a_median_is_the_mean_over_the_kinds_of_queries_that_all_were_measured_with(run, tmp_path):
    other = {"queries": "correlated"}
    folder = run(
        latency("triton", 2.0),
        latency("triton", 1.0, config=other),
        latency("flash", 3.0),
        latency("flash", 2.0, config=other),
        latency("flex", 0.1),  # of one kind only: no fair comparison
    )
    (row,) = record.write_measured([folder], tmp_path / "out.json")["rows"]
    assert row["latency_ms"] == {"forward": {"triton": 1.5, "flash": 2.5}}


def test_what_is_no_latency_of_a_backend_is_left_out(run, tmp_path):
    folder = run(
        latency("triton", 2.0),
        latency("somebody's", 1.0),
        latency("flash", 1.0, operation="dense_attention"),
        latency("flash", 1.0, metric="peak_memory", unit="GiB"),
        latency("flash", 1.0, "step"),
        latency("flash", None),
    )
    (row,) = record.write_measured([folder], tmp_path / "out.json")["rows"]
    assert row["latency_ms"] == {"forward": {"triton": 2.0}}


def test_a_run_without_a_gpu_or_without_latencies_is_refused(run, tmp_path):
    for gpus, rows in (([], [latency("triton", 2.0)]), ([GPU], [])):
        folder = run(*rows, gpus=gpus, name=f"02-{len(gpus)}")
        with pytest.raises(ValueError, match=f"{folder.name} has no latencies of backends"):
            record.write_measured([folder], tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_what_a_benchmark_writes_is_taken(run, tmp_path):
    shape = Shape(4096, heads=8, kv_heads=2, config=NSAConfig(select_count=8))
    cells = [
        empty(shape, backend, "cuda", Ceilings(790.0, 4.2))
        | {"outcome": "ok", "latency_ms": {"forward": [ms] * 3, "graph_forward": [0.1] * 3}}
        for backend, ms in zip(of_backends(["triton", "flash"]), (2.0, 3.0), strict=True)
    ]
    (row,) = record.write_measured([run(*record.rows(cells))], tmp_path / "out.json")["rows"]
    assert (row["tokens"], row["heads"], row["dtype"]) == (4096, 8, "bfloat16")
    assert row["config"]["select_count"] == 8
    assert row["latency_ms"] == {"forward": {"triton": 2.0, "flash": 3.0}}
