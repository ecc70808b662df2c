"""Plant in a clone what people leave lying about before they run its tests.

    python tests/support/left_behind.py CLONE

None of it is the project's, so no test may look at it. A clone of your own is changed for good.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

LOOSE = {
    # A failed run, a half-written one, one that was killed at once, and the page over all of them.
    "runs/2026-12-01/01_memory_scaling-0000000a/record.json": '{"started": "2026-12-01T10:00:00Z",'
    ' "run_id": "01_memory_scaling-0000000a", "notebook": "01_memory_scaling", "status": "failed"}',
    "runs/2026-12-01/01_memory_scaling-0000000b/record.json": '{"run_id": "01_mem',
    "runs/2026-12-01/01_memory_scaling-0000000b/metrics.csv": 'operation,backend\n"half',
    "runs/2026-12-01/01_memory_scaling-0000000c/stdout.log": "",
    "runs/2026-12-01/torch_versions-00000000.json": "{}",
    "runs/index.html": "<html>01_memory_scaling-0000000a</html>",
    "trials/0000/spec.json": '{"subject": "nsa.gone:make"}',
    # Plots of such a run, and one that somebody drew.
    "figures/01_memory_scaling--growth.svg": "<svg>run 01_memory_scaling-0000000a, a CPU</svg>",
    "figures/mine.svg": "<svg>run 01_memory_scaling-0000000a, a CPU</svg>",
    # Notebooks and parameters of their own, and what JupyterLab keeps beside a notebook.
    "notebooks/Untitled.ipynb": '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}',
    "notebooks/.ipynb_checkpoints/01_memory_scaling-checkpoint.ipynb": "{",
    "notebooks/12_mine.ipynb": "not yet a notebook, of run 01_memory_scaling-0000000a",
    "notebooks/params/mine.yaml": "tokenz: [64]\n",
    "notebooks/params/99_smoke.yaml": "tokens: [64]\n",
    "notebooks/params/ab_mine.yaml": "steps: 2\n",
    "notebooks/params/batch_mine.yaml": "phases: nowhere\n",
    "notebooks/params/plan_mine.yaml": "x: 1\n",
    # Notes, pages that were built, and documents in the making.
    "docs/notes.md": "[gone](gone.md), run 01_memory_scaling-0000000a, /home/" + "ann/nsa\n",
    "docs/_build/index.html": "01_memory_scaling-0000000a",
    "site/index.html": "01_memory_scaling-0000000a",
    "site/runs/01_memory_scaling-0000000a.html": "01_memory_scaling-0000000a",
    # Other Pythons', other environments', and what building leaves.
    "nsa/__pycache__/config.cpython-39.pyc": "\udc80 01_memory_scaling-0000000a",
    "tests/house/__pycache__/test_gone.cpython-39-pytest-7.0.0.pyc": "\udc80",
    "build/lib/nsa/config.py": "raise ImportError('an old build')\n",
    "dist/nsa-0.0.1-py3-none-any.whl": "\udc80",
    ".venv-of-another-name/lib/python3.9/site-packages/x.py": "from nsa import gone\n",
    ".pytest_cache/v/cache/lastfailed": "{}",
    ".hypothesis/examples/x": "",
    "core.4711": "\udc80" * 3 * 2**20,
}
# A run as it was, under another id and younger than all others: whoever takes the newest takes it.
RUN = "runs/2026-11-21/01_memory_scaling-28623959"
OWN = "runs/2026-12-02/01_memory_scaling-0000000d"


def plant(root: Path) -> None:
    for name, text in LOOSE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    shutil.copytree(root / RUN, root / OWN)
    for file in (root / OWN).glob("*.json"):
        file.write_text(
            file.read_text().replace("28623959", "0000000d").replace("-11-21", "-12-02")
        )
    verdicts = root / OWN / "verdicts.json"
    verdicts.write_text(verdicts.read_text().replace('"PASS"', '"FAIL"'))
    (root / RUN / ".ipynb_checkpoints").mkdir()
    shutil.copy(root / RUN / "notebook.ipynb", root / RUN / ".ipynb_checkpoints")
    shutil.copytree(root / RUN, root / "runs/kept by hand")
    command = [sys.executable, "setup.py", "--quiet", "egg_info"]  # as installing leaves it
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    run_in_jupyterlab(root / "notebooks/01_memory_scaling.ipynb")
    (root / "notebooks/params/smoke.yaml").write_text("tokens: [many]\nnowhere: 1\n")


def run_in_jupyterlab(notebook: Path) -> None:
    """Change a cell, leave an error below another, and widgets with a state."""
    content = json.loads(notebook.read_text())
    content["metadata"]["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    (first,) = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    first["source"] = [line.replace("[256, 512, 1024]", "[333]") for line in first["source"]]
    error = {"ename": "KeyError", "evalue": "1", "output_type": "error", "traceback": ["KeyError"]}
    code[-1].update(execution_count=77, outputs=[error])
    notebook.write_text(json.dumps(content))


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "nsa").is_dir():
        sys.exit(__doc__)
    plant(Path(sys.argv[1]))
