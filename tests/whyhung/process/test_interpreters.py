"""Another interpreter: what it runs, and what is said of one that cannot."""

import os
import sys
import sysconfig
import venv

import pytest

from whyhung.process import interpreters, trial
from whyhung.process.runner import Spec, run


def wrapper(folder, name, body):
    made = folder / name
    made.write_text(f"#!/bin/sh\n{body}\n")
    made.chmod(0o755)
    return str(made)


HIDING = """
import sys, runpy

class Missing:
    def find_spec(self, name, *rest):
        if name == "jaxtyping":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = sys.argv[sys.argv.index("-m") + 1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def test_what_is_not_there_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "run_child", lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(ValueError, match=r"python='/no/python' cannot be run.*venv/bin/python"):
        interpreters.check("/no/python", "a:b")
    with pytest.raises(ValueError, match="there is no such program"):
        run(Spec("a:b", python="/no/python"), folder=tmp_path / "trial")
    assert not (tmp_path / "trial").exists()


@pytest.mark.processes
@pytest.mark.slow
def test_what_cannot_run_a_subject_says_what_would_do(tmp_path):
    subject, ended = "workbook.lab.search.training_subject:make", {}
    venv.create(tmp_path / "empty", symlinks=True)
    torchless = str(tmp_path / "empty" / "bin" / "python")
    (tmp_path / "hiding.py").write_text(HIDING)
    bare = wrapper(tmp_path, "bare", f'exec {sys.executable} {tmp_path}/hiding.py "$@"')
    echo = wrapper(tmp_path, "echo", "echo 3.11")
    text = tmp_path / "text"
    text.write_text("no program")
    text.chmod(0o755)
    for python in (torchless, bare, echo, str(text)):
        with pytest.raises(ValueError) as caught:
            interpreters.check(python, subject)
        ended[python] = str(caught.value)
    assert ended[torchless].endswith(f"has no torch; `{torchless} -m pip install torch` would do")
    assert f"`{bare} -m pip install jaxtyping` would do" in ended[bare]
    assert "exited with 0 before it had a result; is it a Python interpreter?" in ended[echo]
    assert "cannot be run: Exec format error" in ended[str(text)]
    with pytest.raises(ValueError, match=r"cannot import nowhere: .*No module named 'nowhere'$"):
        interpreters.check(sys.executable, "nowhere:make")
    found = interpreters.check(sys.executable, subject)
    assert found["torch"] and found["python"] == sys.version.split()[0]


def test_packages_of_this_interpreter_are_kept_from_another_one(monkeypatch):
    own = sysconfig.get_paths()["purelib"]
    monkeypatch.setattr(sys, "path", ["/mine", own])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([own, "/mine"]))
    given = trial._environment({}, "cookie", "/other/python")
    assert own not in given["PYTHONPATH"].split(os.pathsep) and own not in given[trial.child.PATH]
    assert "/mine" in given["PYTHONPATH"].split(os.pathsep) and "/mine" in given[trial.child.PATH]
    assert own in trial._environment({}, "cookie", None)["PYTHONPATH"].split(os.pathsep)
