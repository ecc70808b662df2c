"""Parameter files for a CPU that are shipped run to the end of their notebooks.

Those of 03, 04 and 07 judge times and rates, which nbval runs with the notebooks' own defaults.
"""

import json
import subprocess
import sys

import pytest
from places import NOTEBOOKS
from processes import environment_with_package

FILES = {"00_smoke": "00", "smoke": "01", "02_smoke": "02", "05_smoke": "05", "06_smoke": "06"}


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
