"""The benchmark: how each implementation ended is a row, and no speed stands beside a red check."""

import json
import math
import os
import re
from dataclasses import replace
from unittest import mock

import bench_peers
import pytest
import torch

from workbook.cli import main as cli
from workbook.lab.measure import timing
from workbook.lab.measure.shapes import TINY_CONFIG, Shape
from workbook.rooms.comparison import cell as bench_cell
from workbook.rooms.comparison import implementations, record, trials
from workbook.runs import metrics

SHAPE = Shape(70, 4, 2, 16, 16, dtype="fp32", config=TINY_CONFIG)


@pytest.fixture(autouse=True)
def interpreter_left_as_it_was():
    """A benchmark on a CPU asks for it in this process, too late for the kernels it has."""
    with mock.patch.dict(os.environ):
        yield


def run(*paths, shape=SHAPE, backends=("gather",), with_dense=False, **options):
    peers = [p if ":" in p else f"bench_peers:{p}" for p in paths]
    chosen = {"backends": list(backends), "peers": peers, "with_dense": with_dense}
    cells = trials.bench([shape], **chosen, **options)
    return {cell["name"].removeprefix("peer bench_peers:"): cell for cell in cells}


def nothing_measured(cell):
    return not (cell["latency_ms"] or cell["memory_mib"] or cell["errors"] or cell["checked"])


def failing(error):
    def fails(*args):
        raise error

    return fails


def test_a_right_implementation_has_times_errors_and_its_paths():
    cell = run(with_dense=True)
    good, flash = cell["gather"], cell["dense-flash"]
    for found in (good, flash):
        assert found["outcome"] == "ok" and found["timing"] == "not meaningful"
        assert set(found["latency_ms"]) == {"forward", "backward"}  # on a GPU "step", too
        assert all(0 < q20 <= m <= q80 for m, q20, q80 in found["latency_ms"].values())
        assert set(found["errors"]) == {"forward", "backward"}
    assert good["paths"]["slc"] == ["gather-chunks"] and flash["operation"] == "dense_attention"
    assert set(good["union"]) == {"4", "8"} and good["union"]["8"] >= good["union"]["4"] > 1
    assert cell["dense-fa4"]["outcome"] == "declined" and cell["dense-fa4"]["message"]
    # fla is never compared, and says why
    assert "l = d = l'" in implementations.FLA.other
    assert cell["fla"]["outcome"] in ("declined", "ok")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")  # Dynamo's own
def test_a_compiled_backward_is_timed_after_it_was_checked():
    """Its first run must not free the graph, or it refuses to keep it ever after."""
    cell = run("compiled")["compiled"]
    assert (cell["outcome"], cell["message"]) == ("ok", "")
    assert set(cell["latency_ms"]) == {"forward", "backward"}


def test_a_red_check_leaves_no_speed_and_the_rest_of_the_table():
    wrong = ("newest_blocks", "wrong_dk")  # each of them in test_row_check
    cells = run(*wrong)
    said = record.ended(list(cells.values()), "red")
    assert len(said) == len(wrong) and cells["gather"]["outcome"] == "ok"
    for name, line in zip(wrong, said, strict=True):
        assert cells[name]["outcome"] == "red" and nothing_measured(cells[name])
        assert name in line


@pytest.mark.parametrize(
    ("path", "outcome", "said"),
    [
        ("right", "ok", ""),
        ("wrong_shape", "error", r"must return o \[B, T, HQ, DV\] = \(1, 70, 4, 16\), got \(1, 4"),
        ("wrong_dtype", "error", "must return torch.float32 as q is, got torch.float64"),
        ("out_of_memory", "oom", "accuracy check: OutOfMemoryError: CUDA out of memory"),
        ("four_arguments", "declined", r"does not take \(q, k, v, gates, config\)"),
        ("NOT_CALLABLE", "declined", "is no function but Backend"),
        ("a_tuple", "error", r"must return o .* got tuple"),
        ("leaves_the_program", "error", "accuracy check: SystemExit: 3"),
        ("forward_only", "ok", "forward only: its output has no gradient"),
        ("gone", "declined", "module bench_peers has no 'gone'"),
        ("nowhere.at.all:f", "declined", "nowhere.at.all cannot be imported"),
        (":f", "declined", "not of the form import.path:function"),
    ],
)
def test_a_peer_that_does_not_work_says_why_and_the_table_survives(path, outcome, said):
    cells = run(path)
    cell = next(c for n, c in cells.items() if n not in ("gather", "fla"))
    assert cell["outcome"] == outcome and re.search(said, cell["message"]), cell["message"]
    assert cells["gather"]["outcome"] == "ok"


@pytest.mark.parametrize("name", ["rounds_its_inputs", "spoils_v"])
def test_who_writes_to_its_inputs_is_red_and_spoils_them_for_nobody(name):
    alone, beside = run(), run(name)
    assert beside[name]["outcome"] == "red" and nothing_measured(beside[name])
    assert "it changes its inputs" in beside[name]["message"]
    assert beside["gather"]["errors"] == alone["gather"]["errors"]


def test_a_result_that_is_wrong_after_the_timing_is_red(monkeypatch):
    monkeypatch.setitem(bench_peers.TIRES, "after", 8)  # 2 for the check, 5 forwards, 1 backward
    cell = run("tires")["tires"]
    assert cell["outcome"] == "red" and nothing_measured(cell)
    assert cell["message"].startswith("o accuracy after the timing: worst error")


def test_a_red_check_at_one_length_keeps_no_error_of_another():
    chosen = {"backends": ["gather"], "peers": ["bench_peers:right"], "with_dense": False}
    cells = trials.bench([replace(SHAPE, tokens=t) for t in (60, 70)], **chosen)
    assert all(set(c["errors"]) == {"forward", "backward"} for c in cells if c["name"] != "fla")


@pytest.mark.full
@pytest.mark.parametrize(
    ("broken", "error", "outcome", "kept"),
    [
        ("extra_memory", torch.OutOfMemoryError("no memory"), "ok", {"forward", "backward"}),
        ("extra_memory", RuntimeError("misaligned address"), "error", set()),
        ("latency", torch.OutOfMemoryError("no memory"), "oom", set()),
    ],
)
def test_speed_stands_beside_a_failure_only_if_memory_ran_out_later(
    broken, error, outcome, kept, monkeypatch
):
    monkeypatch.setattr(timing, broken, failing(error))
    cell = run(cpu_memory=True)["gather"]
    assert cell["outcome"] == outcome and set(cell["latency_ms"]) == kept
    assert type(error).__name__ in cell["message"]


def test_a_device_that_fails_before_a_shape_leaves_the_shapes_before(monkeypatch):
    monkeypatch.setattr(trials.limits, "measure_ceilings", failing(RuntimeError("CUDA error")))
    cell = run()["gather"]
    assert cell["outcome"] == "ok" and math.isnan(cell["ceilings"]["matmul_tflops"])
    assert "gather" in record.text([cell])


def test_a_backend_without_backward_is_timed_forward_only():
    cell = run(backends=["flex"])["flex"]
    assert cell["outcome"] == "ok" and "forward only: flex_attention has no" in cell["message"]
    assert set(cell["latency_ms"]) == {"forward"} == set(cell["errors"])


def test_what_does_not_fit_says_so(monkeypatch):
    late = run(budget_s=1e-9)["gather"]
    assert late["outcome"] == "not run" and "the budget was used up before" in late["message"]
    monkeypatch.setattr(implementations, "free_bytes", lambda device: 1 << 17)
    cells = run(backends=["masked", "gather"])
    assert cells["masked"]["outcome"] == "skipped" and cells["gather"]["outcome"] == "ok"
    assert "its T x T tensors take" in cells["masked"]["message"]
    monkeypatch.setattr(bench_cell, "draw", failing(RuntimeError("no room")))
    lost = run()["gather"]
    assert (lost["outcome"], lost["message"]) == ("not run", "RuntimeError: no room")


def test_a_share_that_ends_in_between_keeps_what_was_measured(monkeypatch):
    plain = timing.latency

    def late(call, device):
        found = plain(call, device)
        monkeypatch.setattr(timing.time, "monotonic", lambda: 1e12)
        return found

    monkeypatch.setattr(timing, "latency", late)
    cell = run()["gather"]
    assert cell["outcome"] == "ok" and set(cell["latency_ms"]) == {"forward"}
    assert "this implementation's share" in cell["message"]


def test_a_broken_device_ends_the_run_with_its_reason(monkeypatch):
    def release(self):
        self.broken = "CUDA error: an illegal memory access"

    monkeypatch.setattr(bench_cell.Runner, "release", release)
    first, *rest = run(backends=["gather", "masked"]).values()
    assert first["message"] != rest[-1]["message"]
    assert all(c["outcome"] == "not run" for c in rest)
    assert "illegal memory access" in rest[-1]["message"]


@pytest.mark.full
def test_memory_beyond_inputs_and_outputs_is_recorded_on_a_cpu():
    shape = replace(SHAPE, tokens=256)
    cell = run(shape=shape, backends=["masked"], cpu_memory=True)["masked"]
    # fp32 probabilities of the selected and the window branch alone
    kept = 2 * 4 * 256 * 256 * 4 / 2**20
    assert kept < cell["memory_mib"]["forward"] < 8 * kept
    assert cell["memory_mib"]["backward"] > kept


def test_rows_fit_the_workbooks_table_and_the_printed_one_names_all():
    cells = list(run("scaled", "gone", with_dense=True).values())
    table = metrics.table([metrics.row(row, {"device": "cpu"}) for row in record.rows(cells)])
    forward = table[(table["mode"] == "forward") & (table["metric"] == "latency")]
    by_name = forward.set_index("backend")["median"]
    assert by_name["gather"] > 0 and by_name["limit"] > 0 and by_name["dense limit"] > 0
    assert math.isnan(by_name["peer bench_peers:scaled"])
    assert {"fraction_of_limit", "error", "mean_union_of_8"} <= set(table["metric"])
    config = json.loads(forward.iloc[-1]["config"])
    assert (config["queries"], config["window"]) == ("random", TINY_CONFIG.window)
    assert config["outcome"]
    printed = record.text(cells)
    for word in ("limit", "gather", "peer bench_peers:scaled", "red", "declined"):
        assert word in printed
    assert "times not meaningful (no GPU)" in printed and "own selection" in printed
    assert all(len(line) < 260 for line in printed.splitlines())


def test_a_spec_through_json_runs_as_a_trial():
    spec = {"shapes": [SHAPE.to_dict()], "backends": ["masked"], "with_dense": False}
    result = json.loads(json.dumps(trials.measure_spec(json.loads(json.dumps(spec)))))
    assert [c["name"] for c in result["cells"]] == ["fla", "masked"]


def command(*words) -> int:
    return cli.main(["bench", "--device", "cpu", *words])


SMALL = ["--backends", "gather", "--queries", "random", "--no-dense"]
SMALL += ["--shapes", "tokens=70,heads=4,kv_heads=2,dim=16,dtype=fp32,window=24"]


@pytest.mark.processes
def test_the_command_prints_the_table_and_writes_rows(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert command(*SMALL, "--json", str(file)) == 0
    printed = capsys.readouterr().out
    assert "gather" in printed and "not meaningful" in printed
    rows = json.loads(file.read_text())
    assert all(set(row) == set(metrics.COLUMNS) for row in rows)
    assert any(row["backend"] == "gather" and row["median"] for row in rows)


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        ("scaled", "NOT ACCURATE"),
        ("wrong_shape", "BROKE OFF: peer bench_peers:wrong_shape at T=70"),
    ],
)
def test_what_is_red_or_breaks_off_exits_with_1_and_is_named(peer, said, capsys):
    assert command(*SMALL, "--peer", f"bench_peers:{peer}") == 1
    assert said in capsys.readouterr().err


@pytest.mark.processes
def test_an_interrupted_benchmark_prints_and_writes_what_it_has(tmp_path, capsys):
    file = tmp_path / "rows.json"
    paths = ["--peer", "bench_peers:right", "--peer", "bench_peers:interrupts"]
    assert command(*SMALL, *paths, "--json", str(file)) == 1
    told = capsys.readouterr()
    assert "interrupted" in told.err and "peer bench_peers:right" in told.out
    names = {row["backend"] for row in json.loads(file.read_text())}
    assert "peer bench_peers:right" in names and "gather" not in names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "huge"], "no shapes are called 'huge'"),
        (["--tokens", "8q"], "'8q' is no number of tokens"),
        (["--backends", "tritn"], "the nearest is 'triton'"),
        (["--queries", "white"], "known are random, correlated"),
        (["--queries", ","], "no kinds of queries; known are random, correlated"),
        (["--backends", ","], "no backends; name some of"),
        (["--peer", "bench_peers:gone"], "module bench_peers has no 'gone'"),
        (["--peer", "bench_peers"], "not of the form import.path:function"),
        (["--json", "no/such/folder/rows.json"], "its folder does not exist"),
        (["--json", "."], "is a folder; name a file"),
    ],
)
def test_a_wrong_request_is_one_line(words, message, capsys):
    assert command(*words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_a_gpu_that_is_not_there_is_refused(capsys):
    assert command("--device", "cuda") == 2
    assert "torch finds no GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_times_memory_graphs_and_ceilings_are_measured():
    shape = Shape(1024, heads=32, kv_heads=2, dim=128, value_dim=128)
    cells = run(shape=shape, backends=["triton", "gather"], with_dense=True, device="cuda")
    for name in ("triton", "dense-flash"):
        found = cells[name]
        assert found["outcome"] == "ok", found["message"]
        assert found["timing"] == "absolute" and found["memory_mib"]["backward"] > 0
        modes = {"forward", "backward", "step", "graph_forward", "graph_backward"}
        assert set(found["latency_ms"]) == modes, found["message"]
        assert found["limit_ms"]["forward"] < found["latency_ms"]["forward"][0]
    gather = cells["gather"]
    assert gather["outcome"] == "ok" and "graph_forward" not in gather["latency_ms"]
    assert cells["triton"]["ceilings"]["matmul_tflops"] > 50


@pytest.mark.gpu
def test_memory_that_runs_out_on_a_gpu_is_a_row_and_is_given_back():
    cells = run("hoard", shape=replace(SHAPE, tokens=64), device="cuda")
    assert cells["hoard"]["outcome"] == "oom"
    assert cells["gather"]["outcome"] == "ok"
    assert torch.cuda.memory_allocated() < 1 << 30
