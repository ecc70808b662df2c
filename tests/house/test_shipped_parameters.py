"""Parameter files for a CPU that are shipped run to the end of their notebooks.

Those of 03, 04 and 07 judge times and rates, which nbval runs with the notebooks' own defaults.
"""

import json
import re
import subprocess
import sys

import pytest
from places import NOTEBOOKS, ROOT
from processes import environment_with_package

from workbook.rooms.ab.plan import ABPlan
from workbook.runs import parameters
from workbook.runs.run import run_notebook

FILES = {"00_smoke": "00", "smoke": "01", "02_smoke": "02", "05_smoke": "05"}
FILES |= {"08_smoke": "08", "09_smoke": "09", "10_smoke": "10", "11_smoke": "11", "12_smoke": "12"}
FILES |= {"13_smoke": "13"}
PLANS = sorted((NOTEBOOKS / "params").glob("ab_*.yaml"))
# The others take longer, and nbval runs their notebooks with the defaults, which are larger.
SHORT = ("08_smoke",)
ELSEWHERE = ("device", "budget_s")  # of the notebook, which are no part of its plan


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "file", [pytest.param(x, marks=[pytest.mark.long] * (x not in SHORT)) for x in FILES]
)
def test_a_shipped_file_runs_to_a_status_that_is_not_failed(file, tmp_path):
    pytest.importorskip("papermill")
    path = NOTEBOOKS / "params" / f"{file}.yaml"
    command = [sys.executable, "-m", "nsa", "run", FILES[file], "-f", path, "--runs", tmp_path]
    options = {"capture_output": True, "text": True, "env": environment_with_package()}
    ended = subprocess.run([*command, "--notebooks", NOTEBOOKS, "--quiet"], **options)
    record = json.loads(next(tmp_path.glob("*/*/record.json")).read_text())
    assert (record["status"], ended.returncode) == ("ok", 0), ended.stdout + ended.stderr
    verdicts = json.loads(next(tmp_path.glob("*/*/verdicts.json")).read_text())
    assert verdicts and not any(claim["verdict"] == "FAIL" for claim in verdicts)


def test_every_file_for_a_cpu_is_known_here():
    shipped = {path.stem for path in (NOTEBOOKS / "params").glob("*smoke.yaml")}
    assert shipped == {*FILES, "03_smoke", "04_smoke", "07_smoke"}


SHIPPED = [
    path
    for path in sorted((NOTEBOOKS / "params").glob("*.yaml"))
    if not path.stem.startswith(("phases", "plan_", "batch_"))
]


def test_what_a_notebook_runs_with_is_what_its_room_accepts():
    refused, runs = {}, (ROOT / "runs").is_dir()  # an sdist has none
    for path in SHIPPED:
        number = "08" if path in PLANS else path.stem[:2] if path.stem[:2].isdigit() else "01"
        [notebook] = NOTEBOOKS.glob(f"{number}_*.ipynb")
        declared = parameters.declared(notebook)
        try:
            given = parameters.check(declared, parameters.read_file(path))
            if not runs and "runs/" in str(given.get("rows")):
                continue
            parameters.check_backends(given)
            parameters.check_together(notebook)(parameters.filled(declared, given))
        except ValueError as error:
            refused[path.name] = str(error)
    assert len(SHIPPED) > 40 and refused == {}


BAD = [
    ("00", {"query": 64}, "query=64 must be below tokens=64"),
    ("00", {"lessons": ["window-of-by-one"]}, "the nearest is 'window-off-by-one'"),
    ("01", {"tokens": []}, "no cell to measure"),
    ("01", {"tokens": [0]}, "tokens=0 is outside 1..inf"),
    ("01", {"backends": ["gathr"]}, "the nearest is 'gather'"),
    ("01", {"longest": ["foo:12"]}, "backend 'foo' is unknown"),
    ("01", {"checkpoint": "3-4"}, "checkpoint='3-4' is not a layer range"),
    ("02", {"shapes": ["tinyy"]}, "no shapes are called 'tinyy'"),
    ("02", {"peers": ["x"]}, "peers='x' is not of the form import.path:function"),
    ("03", {"deadlines": []}, "deadlines is empty"),
    ("03", {"steps": 8}, "allowed=8.0 steps of 8"),
    ("04", {"variants": ["foo"]}, "'foo' is not of the form name=value"),
    ("04", {"mutants": ["foo"]}, "mutant 'foo' is unknown"),
    ("04", {"mutants_from": "00_correctness-zzz"}, "no run '00_correctness-zzz'"),
    ("05", {"trials": ["xx"]}, "no trial 'xx'"),
    ("05", {"communication": "nccl", "device": "cpu"}, "'gloo' would do"),
    ("06", {"kept": "06-xx"}, "06-xx"),
    ("07", {"only": ["zz"]}, "no fault, control or program 'zz'"),
    ("07", {"counted": "gathr"}, "the nearest is 'gather'"),
    ("09", {"backends": ["gathr"]}, "the nearest is 'gather'"),
    ("09", {"checkpoints": ["3-4"]}, "checkpoint='3-4' is not a layer range"),
    ("09", {"boundaries": [{"preset": "repro"}]}, "gib=None of a boundary must be a number"),
    ("09", {"gpu": "H900"}, "gpu='H900' is none that is known"),
    ("08", {"steps": 2}, "steps=2 leave none to time after warmup=2"),
    ("10", {"overlap": 61}, "overlap=61 must be 1 to 60, half of the steps"),
    ("10", {"settings": ["", "expandable"]}, "must be text as 'max_split_size_mb:64'"),
    ("10", {"over_mib": [65.0, 60.0]}, "[60, 65] and 4 would do"),
    ("11", {"sizes": ["64k"]}, "'64k' is no size; write 32x64k"),
    ("11", {"pages": [100]}, "page=100 is not a multiple of select_block=64"),
    ("11", {"backends": ["tritn"]}, "the nearest is 'triton'"),
    ("12", {"tokens": [1000]}, "tokens=1000 on 2 ranks are no chunks of whole blocks"),
    ("12", {"ranks": [1]}, "no cell has several ranks"),
    ("12", {"methods": ["gathr"]}, "gathr"),
    ("12", {"config": "small"}, "small"),
    ("12", {"rows": ["none.jsonl"]}, "rows='none.jsonl' is no file"),
    ("13", {"variants": ["nsa"]}, "variants=['nsa'] lack 'dense'"),
    ("13", {"rows": ["none.jsonl"]}, "rows='none.jsonl' is no file"),
    ("13", {"batch_tokens": 768}, "batch_tokens=768 are no multiple of tokens=512"),
    ("13", {"seeds": [0, 0]}, "two cells are equal"),
    ("11", {"peers": ["x"]}, "peers='x' is not of the form import.path:function"),
]


@pytest.mark.parametrize(("number", "given", "message"), BAD)
def test_what_a_room_could_not_run_is_refused_before_a_folder_is_made(
    number, given, message, tmp_path
):
    if {"mutants_from", "kept"} & given.keys() and not (ROOT / "runs").is_dir():
        pytest.skip("there are no runs here, as in an sdist, so no name is looked for")
    with pytest.raises(ValueError, match=re.escape(message)):
        run_notebook(number, given, root=tmp_path / "runs", notebooks=NOTEBOOKS)
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
@pytest.mark.processes
def test_a_gpu_that_is_not_there_is_missed_before_a_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError, match="device='cuda' needs a GPU"):
        run_notebook("01", {"device": "cuda"}, root=tmp_path / "runs", notebooks=NOTEBOOKS)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_shipped_ab_predicts_before_it_runs_and_can_be_run_where_it_says(path, monkeypatch):
    pytest.importorskip("papermill")
    given = parameters.read_file(path)
    declared = parameters.declared(NOTEBOOKS / "08_ab.ipynb")
    whole = parameters.filled(declared, parameters.check(declared, given))
    assert {"question", "predicts", "expect"} <= given.keys()
    on_gpu = given.get("device") == "cuda"
    monkeypatch.setattr("torch.cuda.is_available", lambda: on_gpu)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8 if on_gpu else 0)
    keys = {name: value for name, value in whole.items() if name not in ELSEWHERE}
    keys["factors"] = {} if given.get("variants") else keys["factors"]
    plan = ABPlan.on("cuda" if on_gpu else "cpu", 1, **keys)
    assert plan.rules
    assert not plan.trials.left_out
    assert on_gpu == path.stem.endswith("_h200")
