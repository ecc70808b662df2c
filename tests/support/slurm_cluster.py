"""A real Slurm of one node on this machine, and notebooks whose end tests decide."""

import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from places import SUPPORT
from sample_notebooks import SET_UP, write_notebook

NEEDED = ("slurmctld", "slurmd", "sbatch", "squeue", "munged")
MISSING = [one for one in NEEDED if not shutil.which(one, path="/bin:/usr/bin:/usr/sbin:/sbin")]
PLAN = """\
timeout: 5m
jobs:
  - {name: run, notebook: waits, grid: {layers: [%s]}}
"""


class Cluster:
    """Its folder has slurm.conf, which SLURM_CONF must name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "slurm.conf"

    def does(self, action: str) -> None:
        """`start`, `stop`, `node-dies`, `node` and others, see slurm.sh."""
        command = ["bash", SUPPORT / "slurm.sh", action, self.folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def cluster():
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a socket's path must be short
    made = Cluster(folder)
    try:
        made.does("start")
        yield made
    finally:
        made.does("stop")
        shutil.rmtree(folder)


class Waiting:
    """A folder with a plan of runs that print "before" and wait until they may end."""

    def __init__(self, folder: Path, layers: str = "1", plan: str = PLAN) -> None:
        self.folder, self.go, self.seen = folder, folder / "go", folder / "seen"
        self.seen.mkdir()
        cells = (
            f"import os, time\nfrom pathlib import Path\nprint('before', flush=True)\n"
            f"gpu = os.environ.get('CUDA_VISIBLE_DEVICES')\n"
            f"Path({str(self.seen)!r}, f'{{os.getpid()}}').write_text(f'{{layers}}: {{gpu}}')\n"
            f"while not Path({str(self.go)!r}).exists():\n    time.sleep(0.05)",
            "print('after')",
        )
        write_notebook(folder / "notebooks" / "01_waits.ipynb", SET_UP, *cells)
        (folder / "plan.yaml").write_text(plan % layers if "%s" in plan else plan)

    def begun(self) -> list[str]:
        """`layers: GPU` of each run that has begun, again for one that began again."""
        return sorted(file.read_text() for file in self.seen.iterdir())

    def wait(self, count: int = 1):
        """Yields until so many runs have begun."""
        while len(self.begun()) < count or not all(self.begun()):
            yield

    def runs(self) -> list[Path]:
        found = (self.folder / "runs").glob("*/*/record.json")
        return sorted((file.parent for file in found), key=lambda folder: folder.stat().st_ctime)


def told(*command: str) -> str:
    """Output of one of Slurm's commands."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for_state(state: str, job: str):
    """Yields until the job has it."""
    while told("squeue", "-h", "-r", "-t", "all", "-o", "%T", "-j", job).strip() != state:
        yield


def at_each_look(events, within_s: float = 300.0):
    """For a driver's `show`: goes on with the generator `events`, until it has ended."""
    ends = time.monotonic() + within_s

    def show(_batch) -> None:
        assert time.monotonic() < ends, "what the test waits for did not come"
        next(events, None)

    return show
