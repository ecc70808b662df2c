"""Where the project's own folders are, for tests that read them or hand them to a child process."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent  # on the path of tests and of their children
TESTS = SUPPORT.parent
ROOT = TESTS.parent
PACKAGE = ROOT / "nsa"
NOTEBOOKS = ROOT / "notebooks"
