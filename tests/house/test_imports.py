"""The house's arrows, read from the import statements: who may know whom, and who needs what."""

import ast
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from places import ROOT
from processes import printed_by

# A layer may import itself and lower floors. reference and kernels share a floor and stay apart.
FLOORS = (
    "spelling config blocks reference,kernels attention parallel model hf recipes,autoload "
    "lab runs rooms cli __main__"
)
FLOOR = {layer: number for number, floor in enumerate(FLOORS.split()) for layer in floor.split(",")}
DATA = "workbook.rooms.case_study.figures"
OURS = ("nsa", "whyhung", "workbook", "")
BASE = {"torch", "numpy", "jaxtyping", "typing_extensions"}  # what `pip install nsa` brings
# What must load with BASE alone. kernels import triton on top, so nobody here imports those on top.
INSIDE = ("config", "blocks", "reference", "attention", "parallel", "model")
LIGHT = ("nsa", *(f"nsa.{name}" for name in INSIDE), "workbook.cli")
PACKAGES = "nsa", "workbook"


@dataclass(frozen=True)
class Import:
    """One imported module, as written in `file`. `on_top`: executed when `file` is loaded."""

    file: Path
    line: int
    target: str
    level: int
    on_top: bool
    runs: bool  # or is for a type checker

    def __str__(self) -> str:
        return f"{self.file.name}:{self.line} imports {'.' * self.level}{self.target}"


def imports_of(file: Path) -> Iterator[Import]:
    return (Import(file, *found) for found in imports_in(file.read_text(encoding="utf-8")))


@cache
def imports_in(source: str) -> list[tuple[int, str, int, bool, bool]]:
    """(line, target, level, on_top, runs) of each import; a text read again costs nothing."""

    def visit(
        node: ast.AST, on_top: bool, runs: bool
    ) -> Iterator[tuple[int, str, int, bool, bool]]:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, x.name, 0, on_top, runs) for x in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from nsa import model` names the module only in its last part
            for name in node.names:
                base = node.module or ""
                target = f"{base}.{name.name}" if base.split(".")[0] in OURS else base
                yield node.lineno, target.strip("."), node.level, on_top, runs
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, on_top and not lazy and not typing, runs and not typing)

    return list(visit(ast.parse(source), True, True))


def layer_of(dotted: str) -> str:
    """nsa.model.data -> model, workbook.lab -> lab; nsa itself, which imports nobody, -> ''."""
    return next(iter(dotted.split(".")[1:]), "")


def dotted_name(package: Path, file: Path) -> str:
    parts = [package.name, *file.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def may_enter(name: str, target: str) -> bool:
    """A room may import itself and the case study's figures, which are data."""
    rooms = [dotted.split(".")[2:3] for dotted in (name, target)]
    inside = all(layer_of(dotted) == "rooms" for dotted in (name, target))
    return not inside or rooms[0] == rooms[1] or target.startswith(DATA)


def files_in(root: Path) -> dict[str, Path]:
    """Modules of both packages by their dotted names."""
    files = (file for name in PACKAGES for file in sorted((root / name).rglob("*.py")))
    return {dotted_name(root / file.relative_to(root).parts[0], file): file for file in files}


def wrong_arrows(root: Path) -> list[str]:
    wrong = []
    for name, file in files_in(root).items():
        layer = layer_of(name)
        for found in imports_of(file):
            target = layer_of(found.target)
            ours = found.target.split(".")[0] in PACKAGES and target not in ("", "__version__")
            if (name, found.target) == ("workbook", "nsa.attention.known"):
                continue  # light, and how the workbook brings a backend
            if found.level:
                wrong.append(f"{found}: relative; write it in full")
            elif ours and not layer:
                wrong.append(f"{found}: {file.parent.name}/__init__.py finds its names when used")
            elif ours and layer not in FLOOR:
                wrong.append(f"{found}: layer {layer!r} has no floor in {Path(__file__).name}")
            elif ours and target not in FLOOR:
                wrong.append(f"{found}: import {target} from the module it lives in")
            elif ours and target != layer and FLOOR[target] >= FLOOR[layer]:
                wrong.append(f"{found}: {layer} must not know {target}")
            elif ours and not may_enter(name, found.target):
                wrong.append(f"{found}: rooms do not import each other")
    return wrong


def modules_loaded_by(root: Path, roots: tuple[str, ...]) -> dict[str, Path]:
    """Files of the packages that run when `roots` and all below them are imported, by `on_top`."""
    files = files_in(root)
    loaded: dict[str, Path] = {}
    below = tuple(f"{root}." for root in roots[1:])
    waiting = [name for name in files if name in roots or name.startswith(below)]
    while waiting:
        name = waiting.pop()
        while name not in files and "." in name:  # nsa.config.NSAConfig -> nsa.config
            name = name.rpartition(".")[0]
        if name in loaded or name not in files:
            continue
        loaded[name] = files[name]
        waiting += [name.rpartition(".")[0]]
        waiting += [found.target for found in imports_of(files[name]) if found.on_top]
    return loaded


def heavy_imports(root: Path) -> list[str]:
    """Imports that run with the light modules and need more than BASE and the standard library."""
    return [
        f"{name}: {found}: import it inside the function that needs it"
        for name, file in sorted(modules_loaded_by(root, LIGHT).items())
        for found in imports_of(file)
        if found.on_top
        and found.target.split(".")[0]
        not in {*PACKAGES, "whyhung", *BASE, *sys.stdlib_module_names}
    ]


def test_imports_run_one_way():
    assert wrong_arrows(ROOT) == []


def test_the_hang_detector_and_the_library_do_not_know_each_other():
    """Neither imports the other, nor the workbook, which imports both."""
    for package, others in (("whyhung", PACKAGES), ("nsa", ("whyhung", "workbook"))):
        assert [
            str(found)
            for file in (ROOT / package).rglob("*.py")
            for found in imports_of(file)
            if found.target.partition(".")[0] in others
        ] == []


def test_every_module_has_a_floor():
    layers = {layer_of(name) for name in files_in(ROOT)} - {""}
    assert layers <= set(FLOOR)


def test_attention_model_and_command_line_load_with_torch_alone():
    assert heavy_imports(ROOT) == []


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    root = tmp_path_factory.mktemp("packages")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.fixture
def copy(packages):
    """The packages, to plant an import in `copy / where`; whole again afterwards."""
    before = {file: file.read_bytes() for file in packages.rglob("*.py")}
    yield packages
    for file in packages.rglob("*.py"):
        if file not in before:
            file.unlink()
        elif file.read_bytes() != before[file]:
            file.write_bytes(before[file])


def plant(file: Path, line: str) -> None:
    with file.open("a") as out:
        out.write(f"\n{line}\n")


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "line", "complaint"),
    [
        ("nsa/reference/nsa.py", "from nsa.kernels import span", "reference must not know kernels"),
        ("nsa/reference/nsa.py", "import nsa.attention.api", "reference must not know attention"),
        ("nsa/config.py", "from nsa import blocks", "config must not know blocks"),
        ("nsa/blocks.py", "def late():\n    import workbook.lab.sweep", "blocks must not know lab"),
        ("nsa/model/data.py", "from workbook.runs.store import x", "model must not know runs"),
        ("workbook/lab/sweep.py", "import workbook.rooms.memory.cell", "lab must not know rooms"),
        ("workbook/rooms/memory/cell.py", "import workbook.rooms.tracing.trials", "rooms do"),
        ("nsa/blocks.py", "from nsa import nsa_attention", "from the module it lives in"),
        ("nsa/model/data.py", "from . import llama", "relative"),
        ("nsa/model/data.py", "from ..attention import api", "relative"),
        ("nsa/__init__.py", "from nsa.config import NSAConfig", "when used"),
        ("nsa/stray.py", "import nsa.config", "has no floor"),
    ],
)
def test_a_planted_arrow_is_caught(copy, where, line, complaint):
    before = wrong_arrows(copy)
    plant(copy / where, line)
    (planted,) = [wrong for wrong in wrong_arrows(copy) if wrong not in before]
    assert complaint in planted


@pytest.mark.full
@pytest.mark.parametrize(
    ("line", "caught"),
    [
        ("import triton", True),
        ("from pandas import DataFrame", True),
        ("try:\n    import flash_attn\nexcept ImportError:\n    pass", True),
        ("def late():\n    import triton", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas", False),
        ("import json, numpy", False),
    ],
)
def test_a_planted_optional_package_is_caught_on_top_only(copy, line, caught):
    before = len(heavy_imports(copy))
    plant(copy / "nsa/model/data.py", line)
    assert (len(heavy_imports(copy)) > before) == caught


def loaded_after(statement: str) -> set[str]:
    """Top packages in a fresh interpreter's sys.modules after `statement`."""
    code = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    return set(printed_by(code).split())


OPTIONAL = {"triton", "flash_attn", "papermill", "matplotlib", "pandas", "nbconvert", "IPython"}
NONE = {"torch", "numpy", "psutil"}
WORKBOOK = OPTIONAL | BASE | {"nbformat", "yaml", "jupyter_client", "sphinx", "submitit"}
LISTED = (
    "import contextlib, io; from workbook.cli.main import main; "
    "printed = contextlib.redirect_stdout(io.StringIO()); "
    "printed.__enter__(); main(['notebooks']); printed.__exit__(None, None, None)"
)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import nsa; nsa.__version__", OPTIONAL | BASE),
        ("from workbook.cli.main import parsers; parsers()[0].format_help()", WORKBOOK),
        ("from workbook.runs.environment import snapshot; snapshot()", {"torch"}),
        ("import workbook.runs.store", {"torch"}),
        (LISTED, WORKBOOK),
        ("import whyhung.process.family", NONE),
        ("import whyhung.process.ranks", NONE),
    ],
)
def test_what_needs_little_loads_little(statement, absent):
    assert not loaded_after(statement) & absent


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(
    "statement", ["from nsa import nsa_attention", "from nsa import LanguageModel"]
)
def test_attention_and_model_load_no_optional_package(statement):
    torch_alone = loaded_after("import torch")
    assert not (loaded_after(statement) - torch_alone) & OPTIONAL


def test_every_public_name_is_there():
    import nsa

    assert all(getattr(nsa, name) is not None for name in nsa.__all__)
    assert set(nsa.__all__) <= set(dir(nsa))
    message = r"no attribute 'nsa_atention'; it has .*nsa_attention"
    with pytest.raises(AttributeError, match=message):
        nsa.nsa_atention  # noqa: B018
