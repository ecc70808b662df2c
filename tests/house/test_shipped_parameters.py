"""Parameter files for a CPU that are shipped run to the end of their notebooks.

Those of 03, 04 and 07 judge times and rates, which nbval runs with the notebooks' own defaults.
"""

import json
import subprocess
import sys

import pytest
from places import NOTEBOOKS
from processes import environment_with_package

from nsa.experiments.ab.plan import ABPlan
from nsa.workbook import parameters

FILES = {"00_smoke": "00", "smoke": "01", "02_smoke": "02", "05_smoke": "05", "06_smoke": "06"}
FILES |= {"08_smoke": "08"}
PLANS = sorted((NOTEBOOKS / "params").glob("ab_*.yaml"))
ELSEWHERE = ("device", "budget_s")  # of the notebook, which are no part of its plan


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("file", FILES)
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
    keys["factors"] = {} if given.get("arms") else keys["factors"]
    plan = ABPlan.on("cuda" if on_gpu else "cpu", 1, **keys)
    assert plan.rules
    assert not plan.trials.left_out
    assert on_gpu == path.stem.endswith("_h200")
