"""The one loop over cells: order, budget, workers, GPUs, endings, and what a person sees of it."""

import math
import os
import signal
import sys
import threading
import time

import pytest

from whyhung.process.gpus import Gpus
from whyhung.process.trial import Outcome, Stopped, run_child
from workbook.lab import sweep
from workbook.lab.sweep import RUN_ENDS, Budget, Interrupted, measure

ENTRY = "trial_entries:ending"
OK = Outcome("ok", {"value": 1}, 0.1, "", 0)
OOM = Outcome("oom", None, 0.1, "no memory", 1)


class Children:
    """In place of `run_child`: each cell ends as `ends(spec)` says; what was asked is kept."""

    def __init__(self, ends=lambda spec: OK):
        self.ends, self.asked, self.now, self.most = ends, [], [], 0
        self.lock = threading.Lock()

    def __call__(self, entry, spec, *, deadline_s, folder, env, stop):
        gpu = env.get("CUDA_VISIBLE_DEVICES")
        with self.lock:
            self.asked.append({"cell": spec["cell"], "s": deadline_s, "folder": folder, "gpu": gpu})
            assert gpu is None or gpu not in self.now
            self.now.append(gpu)
            self.most = max(self.most, len(self.now))
        try:
            ended = self.ends(spec)
            return ended(stop) if callable(ended) else ended
        finally:
            with self.lock:
                self.now.remove(gpu)


def swept(cells, run=None, **options):
    def spec(cell, share_s):
        return {"cell": cell, "how": cell, "name": "HOME", "share_s": share_s}

    return measure(ENTRY, cells, spec, run=run, **{"deadline_s": 60, "progress": False} | options)


@pytest.mark.full
@pytest.mark.processes
def test_every_way_to_end_is_an_outcome_in_its_place(tmp_path, capsys):
    how = ("environment", "wrapped_out_of_memory", "sleep", "kill_itself", "value_error",
           "declining")  # fmt: skip
    found = swept(how, workers=2, deadline_s=3, folder=tmp_path, progress=True)
    statuses = ["ok", "oom", "timeout", "crash", "error", "declined"]
    assert [ended.status for ended in found] == statuses
    assert found[0].result == {"value": os.environ["HOME"]}
    assert all(ended.message and ended.result is None for ended in found[1:])
    assert all(ended.evidence for ended in found[1:3])
    assert found[5].message == "not for such cells"
    places = [place.name for place in sorted(tmp_path.iterdir())]
    assert places[:2] == ["000-environment", "001-wrapped-out-of-memory"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6 and lines[-1].startswith("[6/6] ")
    assert any("value_error: error after" in line and "not a colour" in line for line in lines)


@pytest.mark.parametrize("workers", [1, 3])
def test_outcomes_keep_the_cells_order_whoever_ends_first(workers):
    together, first_of_all = threading.Barrier(workers), threading.Event()

    def ends(spec):
        if spec["cell"] < workers:
            together.wait(60)  # as many as there are workers run at once
        if spec["cell"] == 0 and workers > 1:
            first_of_all.wait(60)  # the first cell ends after the last has begun
        if spec["cell"] == 5:
            first_of_all.set()
        return Outcome("ok", {"cell": spec["cell"]}, 0.1, "", 0)

    children = Children(ends)
    found = swept(range(6), children, workers=workers)
    assert [ended.result["cell"] for ended in found] == list(range(6))
    assert children.most == workers
    assert {ended.alone for ended in found} == {workers == 1}


def test_cells_that_say_the_same_of_themselves_have_folders_of_their_own(tmp_path):
    swept([7, 7], children := Children(), folder=tmp_path, name=lambda cell: f"T={cell} fp32/x")
    names = [asked["folder"].name for asked in children.asked]
    assert names == ["000-T=7-fp32-x", "001-T=7-fp32-x"]


def test_a_cell_without_time_is_not_run_and_one_that_is_cut_short_was_not_tried():
    def ends(spec):
        time.sleep(spec["share_s"])
        return Outcome("timeout", None, spec["share_s"], "still running", -15, "where")

    children = Children(ends)
    cut, unrun = swept([1, 2], children, budget_s=0.2)
    assert (cut.status, cut.evidence) == ("not run", "where")
    assert cut.message == "the budget of 0.2 s was used up after 0 s of this one"
    assert (unrun.status, unrun.message) == ("not run", "the budget of 0.2 s was used up")
    assert len(children.asked) == 1 and 0 < children.asked[0]["s"] <= 0.2
    (late,) = swept([1], children, deadline_s=0.01, budget_s=60)
    assert (late.status, late.message) == ("timeout", "still running")
    assert children.asked[1]["s"] == 0.01
    bad = Children(lambda spec: Outcome("error", None, 0.0, "bad", 1))
    assert swept([1], bad, budget_s=9)[0].message == "bad"


@pytest.mark.parametrize("workers", [1, 4])
def test_each_gpu_has_one_cell_at_a_time_however_many_workers(workers):
    meet = threading.Barrier(2, timeout=10)

    def ends(spec):
        meet.wait()  # nobody passes alone
        return OK

    swept(range(6), children := Children(ends), gpus=Gpus(("3", "5")), workers=workers)
    assert {asked["gpu"] for asked in children.asked} == {"3", "5"} and children.most == 2
    swept(range(2), alone := Children(), gpus=Gpus(("1",)), workers=workers)
    assert {asked["gpu"] for asked in alone.asked} == {"1"} and alone.most == 1


@pytest.mark.parametrize(
    ("cells", "workers", "times"), [(("crowded", "ok"), 2, 3), (("crowded",), 2, 1),
                                    (("crowded", "ok"), 1, 2)],
)  # fmt: skip
def test_a_cell_that_lacked_memory_beside_others_runs_again_alone(cells, workers, times, capsys):
    children = Children(lambda spec: OOM if spec["cell"] == "crowded" else OK)
    found = swept(cells, children, workers=workers, again_alone=True, progress=True)
    assert found[0].status == "oom" and found[0].alone and len(children.asked) == times
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == times and ("(again, alone)" in lines[-1]) == (times == 3)
    assert swept(cells, Children(children.ends), workers=workers)[0].alone == (times < 3)


@pytest.mark.processes
def test_an_interrupt_ends_the_children_and_keeps_what_was_measured(capsys):
    def run(entry, spec, **options):
        if spec["cell"] == "sleep":
            threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
        return run_child(entry, spec, **options)

    with pytest.raises(Interrupted) as cut:
        swept(["environment", "sleep", "environment"], run, progress=True)
    assert [ended and ended.status for ended in cut.value.ended] == ["ok", None, None]
    assert "interrupted: 1 of 3 cells are measured" in capsys.readouterr().err


def test_the_first_to_raise_ends_the_others_and_is_what_is_raised():
    both, stopped = threading.Barrier(2, timeout=10), []

    def ends(spec):
        both.wait()
        if spec["cell"] == 0:
            raise RuntimeError("the lab itself is broken")

        def later(stop):
            stopped.append(stop.wait(10))
            raise Stopped("it was stopped")

        return later

    children = Children(ends)
    with pytest.raises(RuntimeError, match="the lab itself"):
        swept(range(6), children, workers=2)
    assert stopped == [True] and len(children.asked) == 2


def test_a_terminal_gets_a_bar_unless_headless(monkeypatch, capsys):
    said = {"name": lambda cell: f"T={cell}", "said": lambda result: f"{result['value']} MiB"}
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    swept([64], Children(), progress=True, **said)
    assert capsys.readouterr().err == "[1/1] T=64: 1 MiB, 0.1 s\n"
    monkeypatch.delenv("NSA_HEADLESS")
    swept([64], Children(), progress=True, **said)
    shown = capsys.readouterr().err
    assert "T=64: 1 MiB" in shown and "1/1 [" in shown
    swept([64], Children(), **said)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "message"), [({"workers": 0}, "workers=0"), ({"deadline_s": 0}, "deadline_s=0")]
)
def test_a_sweep_that_cannot_be_run_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        swept([1], children := Children(), **options)
    assert not children.asked


def test_each_runs_functions_as_well():
    ended = []
    found = sweep.each(
        lambda gpu, item: (gpu, 2 * item), [1, 2], ended=lambda *told: ended.append(told)
    )
    assert found == [(None, 2), (None, 4)] and sorted(ended) == [(0, (None, 2)), (1, (None, 4))]


def test_trials_share_a_budget_and_have_no_more_than_their_deadline():
    assert Budget(100).share(30) == 30 and Budget().share(1e9) == 1e9
    assert Budget(100).share(300) == pytest.approx(100, abs=1)
    assert Budget(0).share(30) <= 0


@pytest.mark.parametrize(("left_s", "most_s"), [(1000, 900), (100, 80), (15, 0), (-5, 0)])
def test_a_run_that_will_be_ended_keeps_time_to_judge(monkeypatch, left_s, most_s):
    monkeypatch.setenv(RUN_ENDS, str(time.monotonic() + left_s))
    for budget in (Budget(), Budget(3600)):
        assert budget.share(math.inf) == pytest.approx(most_s, abs=1)
        assert budget.used_up == f"the {most_s} s that the run's timeout left for this were used up"
    if most_s:  # a budget within what the run has left is kept
        assert Budget(60).share(math.inf) == pytest.approx(60, abs=1)
        assert Budget(60).used_up == "the budget of 60 s was used up"
