"""A machine's GPUs: which of them are this process's, whose they are, and who has one alone."""

import os
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nsa.experiments.comparison import trials as comparison
from nsa.lab import sweep
from nsa.lab.measure.shapes import Shape
from nsa.lab.process import gpus, preflight
from nsa.lab.process.runner import Spec, run
from nsa.lab.process.trial import Outcome


def test_a_foreign_process_on_the_gpu_is_a_reason_to_trust_nothing(monkeypatch):
    rows = [["4294967", "1000"], [str(os.getpid()), "50"]]
    monkeypatch.setattr(preflight, "_smi", lambda query, only=None: rows)
    assert preflight.reasons(True) == ["the GPU is also used by process 4294967 (1000 MiB)"]
    assert preflight.reasons(False) == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("visible", "asked"),
    [
        (None, None),
        ("", None),
        ("1", "1"),
        ("2, 0", "2,0"),
        ("GPU-3a", None),  # nvidia-smi knows no short forms
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",) * 2,
    ],
)
def test_only_visible_gpus_are_asked_about(visible, asked, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$@" | tr " " "\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    wanted = [f"--id={asked}"] if asked else []
    told = [",".join(row) for row in preflight.gpus("name")]
    assert told == ["--query-gpu=name", "--format=csv,noheader,nounits", *wanted]


@pytest.mark.processes
def test_a_lent_gpu_is_the_only_one_that_a_trial_sees_and_is_asked_about(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(preflight, "uses_gpu", lambda settings, env: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    preflight.environment(None)  # asks about all, once
    (tmp_path / "asked").unlink(missing_ok=True)
    spec = Spec("subject_entries:visible", {"wanted": "1"}, steps=3)
    evidence = run(spec, folder=tmp_path / "trial", gpu="1", stall_s=1.0, deadline_s=30.0)
    assert (evidence.end.how, evidence.preflight) == ("returned", [])
    assert "CUDA_VISIBLE_DEVICES" not in evidence.spec["env"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked and all("--id=1" in line for line in asked)


@pytest.mark.parametrize(("visible", "names"), [("2, 5", ("2", "5")), ("", ()), (None, ("0", "1"))])
def test_visible_gpus_are_lent_one_by_one(visible, names, monkeypatch):
    monkeypatch.setattr(preflight, "gpus", lambda fields: [["H200"], ["H200"]])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    pool = gpus.all_visible()
    assert pool.names == names
    held, most, lock = [], [], threading.Lock()

    def use(_):
        with pool.one() as gpu:
            with lock:
                held.append(gpu)
                most.append(list(held))
            time.sleep(0.01)
            with lock:
                held.remove(gpu)
        return gpu

    with ThreadPoolExecutor(6) as many:
        used = list(many.map(use, range(12)))
    if names:
        assert set(used) == set(names) and all(len(set(now)) == len(now) for now in most)
    else:
        assert set(used) == {None} and max(map(len, most)) > 2  # nobody waits


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
    pool, plain = gpus.Gpus(("0",)), gpus.Future.result
    holder = pool.one()
    holder.__enter__()

    def interrupted(turn):
        monkeypatch.setattr(gpus.Future, "result", plain)
        if had:
            holder.__exit__(None, None, None)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpus.Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt), pool.one():
        pass
    if not had:
        holder.__exit__(None, None, None)
    with pool.one() as gpu:
        assert gpu == "0"


def test_memory_that_nobody_is_seen_to_hold_is_one_as_well(monkeypatch):
    rows = {"--query-gpu=memory.used": [["4"], ["9000"]]}
    monkeypatch.setattr(preflight, "_smi", lambda query, only=None: rows.get(query, []))
    said = ["9000 MiB of GPU 1 are in use by a process that cannot be seen"]
    assert preflight.reasons(True) == said and preflight.reasons(False) == []


@pytest.mark.processes
def test_who_could_not_be_ended_speaks_against_the_next_trial():
    sleeper = subprocess.Popen(["sleep", "60"])
    started = preflight.procfs.process(sleeper.pid).started
    try:
        assert preflight.remember(sleeper.pid, started)
        assert preflight.reasons(False) == [f"process {sleeper.pid} of an earlier trial still runs"]
    finally:
        sleeper.kill()
        sleeper.wait()
    assert preflight.reasons(False) == [] and not preflight.remember(sleeper.pid, started)


def test_a_device_that_stays_full_is_told(monkeypatch):
    monkeypatch.setattr(preflight, "used_mib", lambda only: [5000, 100])
    told = preflight.wait_until_free([100, 100], within_s=0.0)
    assert told == ["GPU 0 still holds 4900 MiB of the trial"]
    assert preflight.wait_until_free([5000, 100]) == []


@pytest.mark.parametrize(
    ("device", "visible", "wanted", "at_once"),
    [
        ("cuda", "3,5", {"3", "5"}, 2),
        ("cuda", "1", {"1"}, 1),
        ("cuda:1", "0,1", {None}, 1),
        ("cpu", "0,1", {None}, 4),
    ],
)
def test_each_visible_gpu_measures_a_shape_at_a_time(
    device, visible, wanted, at_once, monkeypatch, tmp_path
):
    seen, now, most, places, lock = [], [], [], set(), threading.Lock()

    def child(entry, spec, *, env, folder, **_):
        places.add(folder)
        gpu = env.get("CUDA_VISIBLE_DEVICES")
        with lock:
            seen.append(gpu)
            now.append(gpu)
            most.append(len(now))
            assert gpu is None or now.count(gpu) == 1
        time.sleep(0.05)
        with lock:
            now.remove(gpu)
        return Outcome("ok", {"cells": [spec["shapes"][0]["tokens"]]}, 0.1, "", 0)

    monkeypatch.setattr(sweep, "run_child", child)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    shapes = [Shape(1024 * n) for n in range(1, 8)] + [Shape(1024)]  # one of them twice
    cells = comparison.compare(
        shapes, deadline_s=9, device=device, workers=4, backends=["gather"], progress=False,
        folder=tmp_path,
    )  # fmt: skip
    assert len(places) == len(shapes)
    assert cells == [shape.tokens for shape in shapes]  # in the order asked for
    assert set(seen) == wanted and max(most) == at_once


@pytest.mark.parametrize(
    ("file", "changes"),
    [("kernels/tiles.py", True), ("model/train.py", True), ("lab/process/trial.py", True),
     ("workbook/claim.py", False), ("cli/main.py", False)],
)  # fmt: skip
def test_a_trial_stands_on_the_source_of_all_that_it_may_import(
    tmp_path, monkeypatch, file, changes
):
    copy = tmp_path / "nsa"
    shutil.copytree(preflight.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(preflight, "PACKAGE", copy)
    before = preflight.source_hash("a.subject:make")
    with (copy / file).open("a") as source:
        source.write("# changed\n")
    assert (preflight.source_hash("a.subject:make") != before) is changes
