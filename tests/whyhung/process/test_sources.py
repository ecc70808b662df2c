"""The files that a subject stands on: what its import statements lead to, and what it loaded."""

import ast
import importlib
import sys
from pathlib import Path

import pytest
import torch

from whyhung.process import preflight, sources

PROJECT = {
    "train.py": "import argparse\nfrom pkg.sub import model\nimport beside\n",
    "beside.py": "",
    "unused.py": "",
    "pkg/__init__.py": "",
    "pkg/sub/__init__.py": "from . import listed\n",
    "pkg/sub/listed.py": "",
    "pkg/sub/model.py": "from ..deep.layers import (  # (both)\n    Layer,\n    helper,\n)\n",
    "pkg/deep/layers.py": "def late():\n    if True: from . import inside; import pkg.other as o\n",
    "pkg/deep/inside.py": "from .. import circle",
    "pkg/deep/helper.py": "",
    "pkg/other.py": "import torch, json\nthis is no Python",
    "pkg/circle.py": "from pkg.sub import model",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name, text in PROJECT.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def own(project, subject):
    return {
        str(Path(f).relative_to(project))
        for f in preflight.files(subject)
        if not f.startswith(tuple(map(str, sources.PACKAGES)))
    }


def test_a_script_stands_on_all_that_its_imports_lead_to(project):
    found = own(project, "train.py")
    # a statement in a function counts, a name that is no module does not, nor does what is broken
    assert found == PROJECT.keys() - {"unused.py", "pkg/deep/helper.py"}
    assert not {"argparse", "torch"} & {Path(f).stem for f in found}


@pytest.mark.parametrize("subject", ["pkg.sub.model:make", "pkg.sub.model"])
def test_a_module_stands_on_its_packages_as_well(project, monkeypatch, subject):
    monkeypatch.syspath_prepend(str(project))
    found = own(project, subject)
    assert {"pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/listed.py"} < found
    assert "train.py" not in found and "pkg/other.py" in found


@pytest.mark.parametrize(("file", "changes"), [("pkg/other.py", True), ("unused.py", False)])
def test_a_helper_that_changes_makes_another_source(project, file, changes):
    before = preflight.source_hash("train.py")
    (project / file).write_text("raise KeyError('it is broken now')")
    assert (preflight.source_hash("train.py") != before) is changes


def test_the_source_is_the_same_wherever_it_lies(project, tmp_path_factory, monkeypatch):
    before = preflight.source_hash("train.py")
    monkeypatch.chdir(project.rename(tmp_path_factory.mktemp("elsewhere") / "moved"))
    assert preflight.source_hash("train.py") == before


def test_nothing_is_executed_to_find_them(project):
    (project / "beside.py").write_text("raise SystemExit('it ran')")
    assert "beside.py" in own(project, "train.py") and "beside" not in sys.modules


def test_no_import_statement_is_missed_that_a_parser_sees():
    for file in Path(torch.__file__).parent.glob("distributed/fsdp/**/*.py"):
        statements = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                statements |= {(0, alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names if alias.name != "*"] or [""]
                base = [node.module] if node.module else []
                statements |= {(node.level, ".".join(filter(None, [*base, n]))) for n in names}
        assert statements <= set(sources._imports(str(file))), file


def test_what_was_loaded_is_told_without_libraries(project, monkeypatch):
    monkeypatch.syspath_prepend(str(project))
    module = importlib.import_module("beside")
    found = sources.loaded()
    monkeypatch.delitem(sys.modules, "beside")
    assert found[module.__file__] == sources.hash_of(module.__file__)
    assert not any("site-packages" in f or f == json_file() for f in found)
    assert not any(f.startswith(tuple(map(str, sources.PACKAGES))) for f in found)


def json_file():
    return sys.modules["json"].__file__


def test_a_file_that_is_written_twice_at_one_moment_is_read_twice(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("x = 1")
    first = sources.hash_of(str(file))
    file.write_text("x = 2")
    assert sources.hash_of(str(file)) != first
    file.unlink()
    assert sources.hash_of(str(file)) == sources.GONE
