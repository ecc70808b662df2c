"""Where the project's own folders are, for tests that read them or hand them to a child process."""

import subprocess
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent  # on the path of tests and of their children
TESTS = SUPPORT.parent
ROOT = TESTS.parent
PACKAGE = ROOT / "nsa"
NOTEBOOKS = ROOT / "notebooks"


def committed_runs() -> list[Path]:
    """The folders of runs that git knows, without those of whoever works here; all without git."""
    listed = ["git", "-C", ROOT, "ls-files", "--", "runs/*/*/record.json"]
    done = subprocess.run(listed, capture_output=True, text=True)
    files = [ROOT / name for name in done.stdout.split()] or ROOT.glob("runs/*/*/record.json")
    return sorted(file.parent for file in files if file.is_file())
