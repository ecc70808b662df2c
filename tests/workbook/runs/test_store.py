import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import numpy
import pandas
import pytest
import torch
from processes import printed_by

from workbook.runs import environment, metrics, opening, store
from workbook.runs.claim import Claim, aim_of
from workbook.runs.files import plain, read_json, write_atomically, write_json
from workbook.runs.record import Record, machine, process_start, status_now
from workbook.runs.store import Machine, find_machine

ROW = {"operation": "train", "backend": "gather", "mode": "step", "metric": "peak_memory"}
ROW |= {"device": "cpu", "unit": "MiB", "x_name": "tokens", "x_value": 128, "median": 12.5}
ROW |= {"config": {"preset": "repro", "layers": 5}}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The run of a notebook that `nsa run` started."""
    facts = {"gpus": [{"name": "NVIDIA H200"}], "torch": "2.13.0", "triton": "3.9.0"}
    facts |= {"git": {"commit": "a" * 40, "dirty": False}}
    write_json(tmp_path / "environment.json", facts)
    monkeypatch.setenv("NSA_RUN", str(tmp_path))
    return store.current({"layers": 2}, notebook="01_tiny")


def make_run(root, name, day="2026-11-21", **changes):
    """A finished run's folder, with a record."""
    folder = opening.create_folder(root, name, day)
    record = {"run_id": folder.name, "notebook": name.rsplit("-", 1)[0], "status": "ok"}
    record |= {"stop_reason": "ok", "started": f"{day}T10:00:00+00:00", "seconds": 3.0}
    write_json(folder / "record.json", record | changes)
    return folder


def test_metrics_have_the_agreed_columns_and_rows_say_where_they_come_from(run):
    assert list(run.metrics().columns) == list(metrics.COLUMNS) and len(run.metrics()) == 0
    run.add_rows([ROW])
    header = (run.folder / "metrics.csv").read_text().splitlines()[0]
    assert header == (
        "operation,backend,mode,metric,unit,x_name,x_value,median,q20,q80,config,"
        "device,torch,triton,commit,date"
    )
    assert list(run.metrics().columns) == header.split(",")
    row = run.metrics().iloc[0]
    assert (row.torch, row.triton) == ("2.13.0", "3.9.0")
    assert row.commit == "a" * 12
    assert datetime.fromisoformat(row.date).tzinfo is not None
    assert row.x_value == 128.0 and row["median"] == 12.5 and math.isnan(row.q20)
    assert json.loads(row.config) == {"preset": "repro", "layers": 5}
    run.add_rows(pandas.DataFrame([{**ROW, "backend": "sdpa", "median": None}]))
    run.add_rows([])
    assert run.metrics()["backend"].tolist() == ["gather", "sdpa"]
    assert run.metrics()["median"].isna().tolist() == [False, True]


def test_a_row_says_on_which_device_it_was_measured_whatever_the_machine_has(run, monkeypatch):
    monkeypatch.setattr(environment, "gpus", lambda: [{"name": "NVIDIA H200"}])
    monkeypatch.setattr(environment, "cpu", lambda: "EPYC")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    bare = {name: value for name, value in ROW.items() if name != "device"}
    with pytest.raises(ValueError, match="needs 'device'"):
        run.add_rows([bare])
    run.add_rows([ROW, bare | {"device": "cuda"}, bare | {"device": "NVIDIA A100"}])
    for device in ("cpu", "auto"):
        run.device(device)
        run.add_rows([bare, ROW])
    found = list(run.metrics()["device"])
    assert found[:3] == ["cpu: EPYC", "NVIDIA H200", "NVIDIA A100"]
    assert found[3:] == ["cpu: EPYC", "cpu: EPYC", "NVIDIA H200", "cpu: EPYC"]
    assert run.devices() == "cpu: EPYC and NVIDIA H200 and NVIDIA A100"
    run.verdict("it is fast", "PASS", "3 ms")
    assert run.verdicts()[0]["device"] == run.devices()
    assert not metrics.on_gpu(run.metrics()) and metrics.on_gpu(run.metrics()[1:3])
    assert not metrics.on_gpu(run.metrics()[:0])


def test_rows_of_before_name_the_machine_s_gpu(run):
    run.add_rows([ROW])
    file = run.folder / "metrics.csv"
    text = file.read_text().replace("device", "gpu").replace(environment.devices()["cpu"], "A100")
    file.write_text(text)
    assert list(run.metrics().columns) == list(metrics.COLUMNS)
    assert run.devices() == "A100"
    run.add_rows([ROW])
    assert run.metrics()["device"].str[:3].tolist() == ["A10", "cpu"]


def test_failures_types_and_words_that_pandas_takes_for_nothing_survive(run):
    varied = {"layers": numpy.int64(5), "rate": math.nan, "lengths": (1, 2)}
    run.add_rows([{**ROW, "median": None, "config": {"outcome": "oom"}}])
    words = {"backend": "NA", "mode": "null", "triton": ""}
    run.add_rows([{**ROW, "config": varied}, ROW | words])
    found = run.metrics()
    failed, kept, _ = metrics.configs(found)
    assert failed == {"outcome": "oom"} and math.isnan(found["median"][0])
    assert kept == {"layers": 5, "rate": None, "lengths": [1, 2]}
    assert "NaN" not in found["config"][1], "no strict JSON"
    assert found.iloc[2][["backend", "mode"]].tolist() == ["NA", "null"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"medain": 1}, "no column 'medain'; the nearest is 'median'"),
        ({"metric": ""}, "needs 'metric'"),
        ({"device": ""}, "needs 'device'"),
        ({"median": "fast"}, "median must be a number, got 'fast'"),
    ],
)
def test_a_wrong_row_is_refused_and_nothing_is_written(run, change, message):
    with pytest.raises(ValueError, match=message):
        run.add_rows([ROW, {**ROW, **change}])
    assert len(run.metrics()) == 0


def test_verdicts_are_kept_in_order_and_a_claim_has_one(run):
    run.verdict("it is linear", "PASS", {"exponent": 1.02})
    run.verdict("it is fast", "INCONCLUSIVE", ["trial 3"])
    run.verdict("it is linear", "FAIL", {"exponent": float("nan")})
    assert read_json(run.folder / "verdicts.json") == [
        {"claim": "it is fast", "verdict": "INCONCLUSIVE", "evidence": ["trial 3"], "device": ""},
        {"claim": "it is linear", "verdict": "FAIL", "evidence": {"exponent": None}, "device": ""},
    ]
    with pytest.raises(ValueError, match="'OK' is not one of FAIL, AIM MISSED, INCONCLUSIVE, P"):
        run.verdict("it works", "OK", None)


def test_claims_are_recorded_and_printed_and_a_refuted_one_ends_the_notebook(run, capsys):
    run.judge([Claim("it is linear", "PASS", 1), Claim.undecided("it is fast", "no GPU")])
    printed = ["PASS: it is linear", "INCONCLUSIVE: it is fast: not decided, no GPU"]
    assert capsys.readouterr().out.splitlines() == printed
    refuted = Claim("it is small", "FAIL", 2)
    with pytest.raises(AssertionError, match="FAIL: it is small"):
        run.judge([refuted, Claim("it is last", "PASS", 3)], shown=False)
    kinds = [entry["verdict"] for entry in run.verdicts()]
    assert kinds == ["PASS", "INCONCLUSIVE", "FAIL", "PASS"]
    assert capsys.readouterr().out == ""
    run.judge([refuted], must_hold=False)  # a prediction may be refuted
    run.judge([Claim("it is fast", aim_of(False), 3)])  # and an aim be missed


def test_a_missed_aim_and_what_this_machine_cannot_tell_have_words_of_their_own():
    assert [aim_of(True), aim_of(False)] == ["PASS", "AIM MISSED"]
    one = Claim.not_here("it is fast", "there is no GPU")
    assert str(one) == "NOT APPLICABLE: it is fast: not applicable here, there is no GPU"
    for word, *verdicts in (
        ("AIM MISSED", "PASS", "AIM MISSED", "INCONCLUSIVE"),
        ("FAIL", "AIM MISSED", "FAIL"),
        ("FAIL", "PASS", "INCONCLUSIVE", "FAIL"),
        ("INCONCLUSIVE", "PASS", "INCONCLUSIVE"),
        ("PASS", "NOT APPLICABLE", "PASS"),
        ("NOT APPLICABLE", "NOT APPLICABLE", "NOT APPLICABLE"),
        ("",),
    ):
        assert store.overall([{"verdict": verdict} for verdict in verdicts]) == word


def test_witnesses_trials_and_figures_lie_in_the_run(run):
    run.show(None, "phases")  # a plot that had nothing to draw
    assert not (run.folder / "figures").exists()
    run.witness({"paths": {"cmp/gather": 3}})
    run.witness({"paths": {}})
    assert read_json(run.folder / "witness.json")[0] == {"paths": {"cmp/gather": 3}}
    assert run.trial_folder("t1").is_dir() and run.trial_folder("t1").parent.name == "trials"
    assert run.figure("a.png") == run.folder / "figures" / "a.png"
    assert run.figure("a.png").parent.is_dir()


@pytest.mark.processes
def test_outside_of_nsa_run_a_notebook_has_a_scratch_run_that_goes_with_it(monkeypatch, tmp_path):
    code = (
        "from workbook.runs import store\n"
        "run = store.current({}, notebook='01_tiny')\n"
        "run.add_rows([{'operation': 'o', 'metric': 'm', 'median': 1, 'device': 'cpu'}])\n"
        "assert len(run.metrics()) == 1 and run.folder.is_dir()\n"
        "print(repr(run), run.folder)"
    )
    monkeypatch.delenv("NSA_RUN", raising=False)
    shown, folder = printed_by(code).split()
    assert shown == "Run(01_tiny)"
    assert not os.path.exists(folder)
    monkeypatch.setenv("NSA_RUN", str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="NSA_RUN names"):
        store.current({})


def _create(root, barrier, results):
    barrier.wait()
    results.put([opening.create_folder(root, "tiny-12345678").name for _ in range(20)])


@pytest.mark.full
def test_processes_that_create_the_same_folder_at_once_each_get_their_own(tmp_path):
    context = multiprocessing.get_context("spawn")
    given = (tmp_path, context.Barrier(2), context.Queue())
    processes = [context.Process(target=_create, args=given) for _ in range(2)]
    for process in processes:
        process.start()
    names = [name for _ in processes for name in given[2].get(timeout=60)]
    for process in processes:
        process.join()
    assert sorted(names) == sorted(["tiny-12345678", *(f"tiny-12345678-{n}" for n in range(2, 41))])


def test_an_unwritable_root_is_said_with_what_would_do(tmp_path):
    (tmp_path / "runs").write_text("a file in its place")
    with pytest.raises(ValueError, match=r"cannot write runs to .*--runs"):
        opening.create_folder(tmp_path / "runs", "tiny-1")
    with pytest.raises(ValueError, match="cannot write runs to /proc/nsa"):
        opening.create_folder("/proc/nsa", "tiny-1")


def test_a_file_is_replaced_whole_or_not_at_all_and_others_can_read_it(tmp_path, monkeypatch):
    target = write_atomically(tmp_path / "a.json", "old")
    assert target.stat().st_mode & 0o777 == 0o644

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(target, "new")
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]


def test_json_takes_numpy_and_has_no_nan():
    given = {"a": numpy.float32(0.5), "b": float("inf"), "c": numpy.arange(2), "d": (1, None)}
    assert plain(given) == {"a": 0.5, "b": None, "c": [0, 1], "d": [1, None]}


def test_the_table_of_runs_is_derived_from_the_folders(tmp_path):
    assert len(store.Store(tmp_path / "none").runs()) == 0
    first = make_run(tmp_path, "01_memory-aaaaaaaa", "2026-11-20")
    second = make_run(tmp_path, "02_speed-bbbbbbbb", status="failed", stop_reason="error")
    write_json(first / "verdicts.json", [{"claim": "c", "verdict": "PASS", "evidence": None}])
    table = store.Store(tmp_path).runs().set_index("run")
    assert list(table.index) == ["2026-11-20/01_memory-aaaaaaaa", "2026-11-21/02_speed-bbbbbbbb"]
    assert table["status"].tolist() == ["ok", "failed"]
    assert table["verdict"].tolist() == ["PASS", ""]
    assert table["folder"].tolist() == [str(first), str(second)]
    # a broken record does not hide the other runs
    (second / "record.json").write_text('{"status": "o')
    assert sorted(store.Store(tmp_path).runs()["status"]) == ["lost", "ok"]


@pytest.mark.parametrize("part", ["{0}", "01_mem", "aaaa", "2026-11-20/{0}", "2026-11-20"])
def test_a_run_is_found_by_any_part_that_fits_one(tmp_path, part):
    wanted = make_run(tmp_path, "01_memory-aaaaaaaa", "2026-11-20")
    make_run(tmp_path, "02_speed-bbbbbbbb")
    assert store.Store(tmp_path).find(part.format(wanted.name)) == wanted


def test_a_run_is_found_by_its_path_as_the_latest_and_first_by_its_whole_name(tmp_path):
    first = make_run(tmp_path, "01_memory-aaaaaaaa", "2026-11-20")
    again = make_run(tmp_path, "01_memory-aaaaaaaa", "2026-11-20")
    last = make_run(tmp_path, "01_memory-bbbbbbbb", "2026-11-21")
    find = store.Store(tmp_path).find
    assert find(first) == find(str(first)) == find("01_memory-aaaaaaaa") == first
    assert find("latest") == last
    # by when they started, not by their names
    early, late = (
        make_run(tmp_path, f"00_zero-{name}", started=f"2026-11-21T{hour}:00:00+00:00")
        for name, hour in (("cccccccc", "09"), ("dddddddd", "11"))
    )
    assert store.Store(tmp_path).folders()[2:] == [early, last, late]
    assert find("latest") == late
    assert find("aaaaaaaa-2") == again and again.name == "01_memory-aaaaaaaa-2"


def test_a_name_that_fits_several_runs_or_none_is_refused(tmp_path):
    make_run(tmp_path, "01_memory-aaaaaaaa")
    find = store.Store(tmp_path).find
    with pytest.raises(ValueError, match=r"no run .*; known are 01_memory-aaaaaaaa"):
        find("01_memroy-aaaaaaaa")
    make_run(tmp_path, "01_memory-abbbbbbb")
    with pytest.raises(ValueError, match=r"fits 2 runs: .*aaaaaaaa, .*abbbbbbb"):
        find("01_memory-a")
    with pytest.raises(ValueError, match="there are no runs"):
        store.Store(tmp_path / "none").find("x")


def running(age_s: float, **changes) -> dict:
    beat = datetime.now(UTC) - timedelta(seconds=age_s)
    return {"status": "running", "heartbeat": beat.isoformat(), "machine": "another", **changes}


@pytest.mark.processes
def test_a_running_record_is_lost_when_its_heartbeat_is_old_and_its_runner_not_here():
    assert status_now(running(300)) == "lost"
    assert status_now(running(30)) == "running"
    assert status_now({"status": "running"}) == "lost"
    mine = {"machine": machine(), "pid": os.getpid(), "pid_started": process_start(os.getpid())}
    assert status_now(running(300, **mine)) == "running"
    # the same number, given to another process since
    assert status_now(running(300, **{**mine, "pid_started": 5.0})) == "lost"
    child = subprocess.Popen([sys.executable, "-c", ""])
    began = process_start(child.pid)
    ended = {"machine": machine(), "pid": child.pid, "pid_started": began}
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert status_now(running(0, **ended)) == "lost", "a zombie runs no more"
    child.wait()
    assert status_now(running(0, **ended)) == "lost"


def test_a_record_beats_while_it_runs_and_ends_with_the_truth(tmp_path):
    record = Record(tmp_path, "01_tiny", "why?", beat_s=0.05)
    try:
        first = read_json(tmp_path / "record.json")
        assert first["status"] == "running" and first["question"] == "why?"
        deadline = time.monotonic() + 20
        while read_json(tmp_path / "record.json")["heartbeat"] == first["heartbeat"]:
            assert time.monotonic() < deadline, "the heartbeat stands still"
            time.sleep(0.05)
    finally:
        record.close("kernel_died", "it died")
    last = read_json(tmp_path / "record.json")
    ended = {"status": "killed", "stop_reason": "kernel_died", "message": "it died"}
    assert ended.items() <= last.items()
    assert last["ended"] and last["seconds"] > 0


@pytest.mark.parametrize(
    ("device", "wanted", "there", "found"),
    [
        ("auto", 1, 0, "cpu"),
        ("auto", 1, 1, "cuda"),
        ("auto", 2, 1, "cpu"),
        ("cuda", 2, 2, "cuda"),
        ("cpu", 1, 1, "cpu"),
        ("gpu", 1, 1, "device='gpu' is unknown; known are auto, cpu, cuda"),
        ("cuda", 1, 0, r"needs a GPU and torch .* finds none; device='cpu' would do, or 'auto'"),
        ("cuda", 2, 1, r"needs 2 GPUs and torch .* finds 1;"),
    ],
)
def test_auto_takes_what_there_is_and_a_device_that_is_not_there_is_refused(
    monkeypatch, device, wanted, there, found
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a name")
    known = {"cpu": Machine("cpu", "a CPU"), "cuda": Machine("cuda", "a name")}
    if found in known:
        assert find_machine(device, wanted) == known[found]
        return
    with pytest.raises(ValueError, match=found):
        find_machine(device, wanted)


def test_a_cpu_gets_one_thread_a_child_and_a_note_that_times_mean_nothing():
    cpu, gpu = Machine("cpu", "a CPU"), Machine("cuda", "a name")
    assert (cpu.on_cpu, cpu.threads, cpu.note) == (True, 1, "a CPU: only ratios mean anything")
    assert (gpu.on_cpu, gpu.threads, gpu.note) == (False, None, "a name")


def test_a_claim_that_lacks_points_names_them_and_does_not_pass():
    points = [f"T {2**i}" for i in range(12, 18)]
    lacking = Claim("it is fast", "PASS", {"ms": 1}).over(points)
    named = "T 4096; T 8192; T 16384; T 32768 and 2 more"
    assert str(lacking) == f"INCONCLUSIVE: it is fast; not measured: {named}"
    assert lacking.evidence == {"found": {"ms": 1}, "not measured": points}
    for verdict in ("FAIL", "AIM MISSED", "INCONCLUSIVE", "NOT APPLICABLE"):
        claim = Claim("it is fast", verdict, {})
        assert claim.over(points) == claim
    assert Claim("it is fast", "PASS", {}).over([]).verdict == "PASS"


def test_points_without_a_value_or_a_row_are_named_but_for_those_that_answered():
    ends = {("a", 1): "ok", ("a", 2): "not run", ("b", 1): "oom", ("c", 1): "ok", ("c", 2): "ok"}
    rows = pandas.DataFrame(
        [{"name": n, "at": t, "outcome": end, "median": 1.0 if end == "ok" else float("nan")}
         for (n, t), end in ends.items()]
    )  # fmt: skip
    assert metrics.unmeasured(rows, ["at"], ["name"]) == ["2, a", "2, b"]
    assert metrics.unmeasured(rows, ["at"], of={"name": ["a"]}) == ["2, a"]
    assert metrics.unmeasured(rows, ["at"], of={"name": ["b", "d"]}) == ["2, b"]
    assert metrics.unmeasured(rows, ["at", "name"]) == ["2, a"]  # what was planned is not known
    assert metrics.unmeasured(rows[rows["name"] == "c"], ["at"], ["name"]) == []
