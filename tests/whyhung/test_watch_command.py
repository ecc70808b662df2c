"""`whyhung watch` and `whyhung attach` on the command line: exit codes, and what is refused."""

import subprocess
import sys

import pytest

from nsa.cli import main as nsa
from whyhung import cli
from whyhung.process import attaching, watching
from whyhung.verdict import Verdict
from whyhung.watch.evidence import Evidence


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["watch"], 2, "no command; write: whyhung watch -- python train.py"),
        (["watch", "--", "no-such-command"], 127, "no-such-command: command not found"),
        (["watch", "--", "/"], 126, "/ cannot be run: Permission denied"),
        (["watch", "--folder", "a", "--node-folder", "b", "--", "true"], 2, "give one of them"),
        (["attach", "4194305"], 2, "there is no process 4194305"),
    ],
)
@pytest.mark.processes
def test_what_cannot_be_is_refused_in_a_line(arguments, code, said, capfd):
    assert cli.main(arguments) == code
    assert said in capfd.readouterr().err


def test_options_reach_the_watcher_and_the_commands_own_stay_its_own(monkeypatch):
    given = {}
    monkeypatch.setattr(watching, "watch", lambda line, **options: given.update(options, l=line))
    monkeypatch.setattr(watching, "as_it_ended", lambda code: 7)
    words = ["watch", "--inside", "off", "--limit", "2h", "--", "train", "--folder", "x", "--", "y"]
    assert cli.main(words) == 7
    assert given["l"] == ["train", "--folder", "x", "--", "y"]
    assert (given["count"], given["limit_s"], given["folder"]) == (False, 7200, None)
    assert (given["on_hang"], given["on_stall"]) == ("report", "report")


@pytest.mark.parametrize(("kind", "code"), [("HANG", 1), ("STALLED", 1), ("SLOW", 0)])
def test_attach_fails_where_something_stands_still(kind, code, monkeypatch, capsys, tmp_path):
    seen = Evidence(spec={"attached": 5}), Verdict(kind, "lock", because=["rank 0 waits"])
    monkeypatch.setattr(attaching, "attach", lambda pid, **_: seen)
    assert cli.main(["attach", "5", "--folder", str(tmp_path)]) == code
    assert "rank 0 waits" in capsys.readouterr().out
    assert (tmp_path / "report.md").is_file()


@pytest.mark.processes
def test_a_watched_folder_can_be_explained(tmp_path, capsys):
    folder = str(tmp_path / "seen")
    command = [sys.executable, "-m", "whyhung", "watch", "--folder", folder, "--", "true"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert cli.main(["explain", folder]) == nsa.main(["explain", folder]) == 0
    assert "PASS" in capsys.readouterr().out
