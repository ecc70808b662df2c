"""Scripts of strangers as subjects: each runs as it does under `python train.py`."""

import json
from pathlib import Path

import pytest

from whyhung.process import preflight, script
from whyhung.process.runner import Spec, run
from whyhung.verdict import judge
from workbook.lab import attached
from workbook.lab.search.ledger import Ledger
from workbook.lab.search.plan import Plan

STEPS = """
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range({steps}):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
"""
PLAIN = (
    """
import argparse, json, os, sys, torch
import helper

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    parser.add_argument("--steps", type=int, default=1)
    given = parser.parse_args()
"""
    + STEPS.format(steps="given.steps")
    + """
    print(json.dumps([sys.argv, sys.path[0], __file__, os.getcwd(), given.lr, helper.WHO]))
    sys.exit(0)

if __name__ == "__main__":
    main()
"""
)
SPAWNS = """
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return torch.full((4,), float(i))

if __name__ == "__main__":
    torch.multiprocessing.set_start_method("spawn")
    print(sum(float(x.sum()) for x in DataLoader(Numbers(), num_workers=1)))
""" + STEPS.format(steps=1)
LATE = """
import atexit, concurrent.futures, threading, time, torch
from pathlib import Path
pool = concurrent.futures.ThreadPoolExecutor(2)  # which nobody closes
assert pool.submit(int, "1").result() == 1
here = Path(__file__).parent
def late():
    time.sleep(0.5)
    (here / "late.txt").write_text("written by a thread after the last line")
threading.Thread(target=late).start()
atexit.register(lambda: (here / "atexit.txt").write_text("flushed"))
"""
RANKS = (
    """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if True:
"""
    + STEPS.format(steps=2)
    + """
    for p in model.parameters():
        dist.all_reduce(p.data)
print("of", dist.get_world_size())
if dist.get_rank() == 1:
    raise KeyError("only rank 1")
dist.barrier()
"""
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder has scripts, one of them in a folder of its own."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "plain.py").write_text(PLAIN)
    (tmp_path / "code" / "helper.py").write_text("WHO = 'helper'")
    for name, text in {"spawns": SPAWNS, "late": LATE, "ranks": RANKS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tried(here, subject, argv=(), **more):
    spec = Spec(subject, argv=argv, **more)
    return run(spec, folder=here / "trial", deadline_s=120.0, attached=attached.PATH)


@pytest.mark.processes
def test_a_script_has_its_words_its_folder_and_its_name(here):
    evidence = tried(here, "code/plain.py", "--lr 0.5 --steps 3")
    assert judge(evidence).kind == "PASS" and evidence.result == {"steps": 3}
    argv, first, file, folder, lr, who = json.loads(evidence.output[-1])
    assert argv == ["code/plain.py", "--lr", "0.5", "--steps", "3"] and (lr, who) == (0.5, "helper")
    assert (first, file) == (str(here / "code"), str(here / "code" / "plain.py"))
    assert folder == str(here) and evidence.last().step == 3
    assert json.loads((here / "trial" / "loaded-0.json").read_text()) == {}  # all was known before


@pytest.mark.processes
@pytest.mark.full
def test_wrong_words_end_it_with_what_it_printed(here):
    evidence = tried(here, "code/plain.py", ["--rate", "1"])
    verdict = judge(evidence)
    assert verdict.kind == "CRASH" and "SystemExit" in verdict.label
    assert "unrecognized arguments: --rate" in evidence.output[-1]


@pytest.mark.processes
@pytest.mark.full
def test_what_it_raises_is_told_from_its_own_first_line(here):
    (here / "raises.py").write_text("def f():\n    raise KeyError(1)\n\nf()\n")
    end = tried(here, "raises.py").end
    assert [line for line in end.traceback.splitlines() if "File" in line] == [
        f'  File "{here}/raises.py", line 4, in <module>',
        f'  File "{here}/raises.py", line 2, in f',
    ]


@pytest.mark.processes
@pytest.mark.full
def test_an_exit_with_0_that_asks_nobody_is_a_return(here):
    (here / "leaves.py").write_text("import os\nprint('done', flush=True)\nos._exit(0)\n")
    evidence = tried(here, "leaves.py")
    assert judge(evidence).kind == "PASS" and evidence.output == ["done"]


@pytest.mark.processes
@pytest.mark.full
def test_a_script_that_changes_before_its_process_reads_it_proves_nothing(here, monkeypatch):
    before = preflight.files

    def stale(subject):
        found = before(subject)
        (here / "late.py").write_text("print('edited meanwhile')")
        return found

    monkeypatch.setattr(preflight, "files", stale)
    evidence = tried(here, "late.py")
    assert judge(evidence).kind == "INCONCLUSIVE"
    assert evidence.preflight == ["rank 0 ran another source than was there at the start"]


@pytest.mark.processes
@pytest.mark.full
def test_workers_that_are_spawned_find_the_script_again(here):
    evidence = tried(here, "spawns.py")
    assert judge(evidence).kind == "PASS", evidence.output
    assert evidence.output[0] == "24.0" and evidence.result == {"steps": 1}


@pytest.mark.processes
def test_what_python_waits_for_at_its_end_is_waited_for(here):
    assert judge(tried(here, "late.py")).kind == "PASS"
    assert (here / "late.txt").exists() and (here / "atexit.txt").exists()


@pytest.mark.processes
@pytest.mark.full
def test_ranks_of_a_script_are_started_by_torchrun(here):
    evidence = tried(here, "ranks.py", ranks=2)
    assert judge(evidence).label == "CRASH:KeyError" and evidence.end.first_rank == 1
    assert evidence.ranks() == [0, 1] and "rank 1: of 2" in evidence.output
    assert evidence.last(1).step == 2


@pytest.mark.processes
@pytest.mark.full
def test_oracles_that_need_no_model_look_at_a_script(here):
    asked = ("memory", "recompilations", "finite")
    evidence = tried(here, "code/plain.py", "--steps 12", oracles=asked)
    found = {name: result["ok"] for name, result in evidence.oracles.items()}
    assert found == {"memory": True, "recompilations": True, "finite": None}
    assert "no `model`" in evidence.oracles["finite"]["detail"]


@pytest.mark.processes
@pytest.mark.full
def test_a_helper_by_a_made_up_name_that_now_raises_is_no_pass_that_was_there(here):
    Path("by_name.py").write_text("import importlib\nimportlib.import_module('hel' + 'per')\n")
    Path("helper.py").write_text("x = 1")
    store, spec = Ledger("trials"), Spec("by_name.py")
    first = store.run(spec)
    assert first[2].kind == "PASS" and store.run(spec)[0] == store.id(spec) == first[0]
    Path("helper.py").write_text("raise KeyError('broken')")
    second = store.run(spec)
    assert second[2].label == "CRASH:KeyError" and store.get(first[0])[1].kind == "PASS"
    assert store.run(spec)[0] == second[0] != first[0]
    Path("helper.py").write_text("x = 1")  # as it was
    assert store.id(spec) == first[0] and len(store.ids()) == 2


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        ("code", "is a folder; name its script: code/helper.py, code/plain.py"),
        ("code/plan.py", "is no file in .*known are helper.py, plain.py"),
        ("book.ipynb", "jupyter nbconvert --to script book.ipynb, then subject=book.py"),
        ("no.such.module", "there is no module of that name .*no file no/such/module.py"),
    ],
)
def test_what_is_no_script_is_told_with_what_would_do(here, subject, said):
    Path("book.ipynb").write_text("{}")
    for refuses in (lambda: Plan({}, subject=subject), lambda: tried(here, subject)):
        with pytest.raises(ValueError, match=said):
            refuses()


def test_a_package_with_a_main_is_a_script_and_one_without_is_none():
    script.check("nsa")
    with pytest.raises(ValueError, match="that can be run"):
        script.check("json")


def test_settings_of_a_script_fill_its_words():
    spec = Spec("t.py", {"lr": 0.1}, argv="--name 'a b' --lr {lr}")
    assert spec.argv == ("--name", "a b", "--lr", "{lr}") and spec.steps is None
    assert script.arguments(spec.argv, spec.settings) == ["--name", "a b", "--lr", "0.1"]
    with pytest.raises(ValueError, match=r"argv='--lr \{lr\}' hands it on"):
        Spec("t.py", {"lr": 0.1})
    with pytest.raises(ValueError, match="is no script"):
        Spec("a:b", argv="--lr 1")
    with pytest.raises(ValueError, match="No closing quotation"):
        Spec("t.py", argv="'open")


def test_a_plan_varies_the_words_of_a_script(here):
    plan = Plan({"lr": [0.1, 1]}, subject="late.py", settings={"argv": ["--lr", "{lr}"]})
    specs = [plan.spec(cell) for cell in plan.cells()]
    assert [script.arguments(s.argv, s.settings)[1] for s in specs] == ["0.1", "1"]
    assert specs[0].oracles == () and len({s.id("", {}) for s in specs}) == 2
    with pytest.raises(ValueError, match=r"late.py is a script, which has neither"):
        Plan({}, subject="late.py", calibrate=True)
