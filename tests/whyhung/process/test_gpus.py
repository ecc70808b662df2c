"""A machine's GPUs: which of them are this process's, whose they are, and who has one alone."""

import os
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from places import ROOT
from processes import running

from whyhung.process import gpus, preflight, sources
from whyhung.process.runner import Spec, run
from whyhung.process.trial import Outcome
from workbook.lab import sweep
from workbook.lab.measure.shapes import Shape
from workbook.rooms.comparison import trials as comparison


def see(names, monkeypatch):
    """Sets CUDA_VISIBLE_DEVICES; not at all for None."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if names is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)


def put_nvidia_smi(folder, line, monkeypatch):
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{line}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.fixture
def held():
    """held(gpu) has it for a moment; held.at_once: what others had as each was taken."""
    now, lock = [], threading.Lock()

    def hold(gpu):
        with lock:
            now.append(gpu)
            hold.at_once.append(list(now))
        time.sleep(0.02)
        with lock:
            now.remove(gpu)

    hold.at_once = []
    return hold


def test_a_foreign_process_on_the_gpu_is_a_reason_to_trust_nothing(monkeypatch):
    rows = [["4294967", "1000"], [str(os.getpid()), "50"]]
    monkeypatch.setattr(preflight, "_smi", lambda query, only: rows)
    assert preflight.reasons(True) == ["the GPU is also used by process 4294967 (1000 MiB)"]
    assert preflight.reasons(False) == []


def test_memory_that_nobody_is_seen_to_hold_is_one_as_well(monkeypatch):
    rows = {"--query-gpu=memory.used": [["4"], ["9000"]]}
    monkeypatch.setattr(preflight, "_smi", lambda query, only: rows.get(query, []))
    said = ["9000 MiB of GPU 1 are in use by a process that cannot be seen"]
    assert preflight.reasons(True) == said and preflight.reasons(False) == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("names", "asked"),
    [
        (None, None),
        ("", None),
        ("1", "1"),
        ("2, 0", "2,0"),
        ("GPU-3a", None),  # nvidia-smi knows no short forms
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",) * 2,
    ],
)
def test_only_visible_gpus_are_asked_about(names, asked, tmp_path, monkeypatch):
    see(names, monkeypatch)
    put_nvidia_smi(tmp_path, 'echo "$@" | tr " " "\\n"', monkeypatch)
    wanted = [f"--id={asked}"] if asked else []
    told = [",".join(row) for row in preflight.gpus("name")]
    assert told == ["--query-gpu=name", "--format=csv,noheader,nounits", *wanted]


@pytest.mark.processes
def test_a_lent_gpu_is_the_only_one_that_a_trial_sees_and_is_asked_about(tmp_path, monkeypatch):
    see("0,1", monkeypatch)
    put_nvidia_smi(tmp_path, f'echo "$@" >> {tmp_path}/asked', monkeypatch)
    monkeypatch.setattr(preflight, "uses_gpu", lambda settings, env: True)
    preflight.environment(None)  # asks about all, once
    (tmp_path / "asked").unlink(missing_ok=True)
    spec = Spec("subject_entries:visible", {"wanted": "1"}, steps=3)
    evidence = run(spec, folder=tmp_path / "trial", gpu="1", stall_s=1.0, deadline_s=30.0)
    assert (evidence.end.how, evidence.preflight) == ("returned", [])
    assert "CUDA_VISIBLE_DEVICES" not in evidence.spec["env"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked and all("--id=1" in line for line in asked)


@pytest.mark.parametrize(("names", "lent"), [("2, 5", ("2", "5")), ("", ()), (None, ("0", "1"))])
def test_visible_gpus_are_lent_one_by_one(names, lent, monkeypatch, held):
    see(names, monkeypatch)
    monkeypatch.setattr(preflight, "gpus", lambda fields: [["H200"], ["H200"]])
    pool = gpus.all_visible()
    assert pool.names == lent

    def use(_):
        with pool.one() as gpu:
            held(gpu)
        return gpu

    with ThreadPoolExecutor(6) as many:
        assert set(many.map(use, range(12))) == set(lent or [None])
    if lent:
        assert all(len(set(now)) == len(now) for now in held.at_once)
    else:
        assert max(map(len, held.at_once)) > 2  # nobody waits


def test_a_gpu_goes_to_whoever_asked_first():
    """Else one of long trials could keep a chain of short ones waiting to the end."""
    pool, served = gpus.Gpus(("0",)), []

    def use(number):
        with pool.one():
            served.append(number)

    with ThreadPoolExecutor(20) as many, pool.one():
        for number in range(20):
            many.submit(use, number)
            while len(pool._waiting) <= number:
                time.sleep(0.001)
    assert served == list(range(20)) and list(pool._free) == ["0"]


@pytest.mark.parametrize("had", [False, True], ids=["waiting", "just served"])
def test_who_is_interrupted_while_it_waits_keeps_no_gpu(had, monkeypatch):
    pool, holder, plain = gpus.Gpus(("0",)), ExitStack(), gpus.Future.result
    holder.enter_context(pool.one())

    def interrupted(turn):
        monkeypatch.setattr(gpus.Future, "result", plain)
        if had:
            holder.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(gpus.Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt), pool.one():
        pass
    holder.close()
    with pool.one() as gpu:
        assert gpu == "0"


@pytest.mark.processes
def test_who_could_not_be_ended_speaks_against_the_next_trial():
    with running(subprocess.Popen(["sleep", "60"])) as sleeper:
        started = preflight.procfs.process(sleeper.pid).started
        assert preflight.remember(sleeper.pid, started)
        assert preflight.reasons(False) == [f"process {sleeper.pid} of an earlier trial still runs"]
    assert preflight.reasons(False) == [] and not preflight.remember(sleeper.pid, started)


def test_a_device_that_stays_full_is_told(monkeypatch):
    monkeypatch.setattr(preflight, "used_mib", lambda only: [5000, 100])
    told = preflight.wait_until_free([100, 100], within_s=0.0)
    assert told == ["GPU 0 still holds 4900 MiB of the trial"]
    assert preflight.wait_until_free([5000, 100]) == []


@pytest.mark.parametrize(
    ("device", "names", "wanted", "most"),
    [
        ("cuda", "3,5", {"3", "5"}, 2),
        ("cuda", "1", {"1"}, 1),
        ("cuda:1", "0,1", {None}, 1),
        ("cpu", "0,1", {None}, 4),
    ],
)
def test_each_visible_gpu_measures_a_shape_at_a_time(
    device, names, wanted, most, monkeypatch, tmp_path, held
):
    see(names, monkeypatch)
    places = set()

    def child(entry, spec, *, env, folder, **_):
        places.add(folder)
        held(env.get("CUDA_VISIBLE_DEVICES"))
        return Outcome("ok", {"cells": [spec["shapes"][0]["tokens"]]}, 0.1, "", 0)

    monkeypatch.setattr(sweep, "run_child", child)
    shapes = [Shape(1024 * n) for n in range(1, 8)] + [Shape(1024)]  # one of them twice
    cells = comparison.compare(
        shapes, deadline_s=9, device=device, workers=4, backends=["gather"], progress=False,
        folder=tmp_path,
    )  # fmt: skip
    assert len(places) == len(shapes)
    assert cells == [shape.tokens for shape in shapes]  # in the order asked for
    assert {gpu for now in held.at_once for gpu in now} == wanted
    assert max(map(len, held.at_once)) == most
    assert all(now.count(gpu) == 1 for now in held.at_once for gpu in now if gpu is not None)


@pytest.mark.parametrize(
    ("file", "changes"),
    [("nsa/kernels/tiles.py", True), ("nsa/model/train.py", True), ("workbook/lab/sweep.py", True),
     ("workbook/runs/claim.py", False), ("workbook/cli/main.py", False)],
)  # fmt: skip
def test_a_trial_stands_on_the_source_of_all_it_may_import(tmp_path, monkeypatch, file, changes):
    ignored = shutil.ignore_patterns("__pycache__")
    places = [ROOT / file.partition("/")[0]]
    copies = {
        shutil.copytree(x, tmp_path / x.name, ignore=ignored): sources.PACKAGES[x] for x in places
    }
    monkeypatch.setattr(sources, "PACKAGES", copies)
    before = preflight.source_hash("a.subject:make")
    with (tmp_path / file).open("a") as source:
        source.write("# changed\n")
    assert (preflight.source_hash("a.subject:make") != before) is changes
