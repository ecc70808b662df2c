"""The project's own files agree with one another, and tell nothing of where they were made."""

import ast
import os
import re
import tomllib
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from places import ROOT, tracked

import nsa

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENTRY_POINTS = {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}
MAX_BYTES = 2 * 2**20
# Brackets keep these patterns from finding themselves.
MACHINE = {
    "a folder of one machine": r"/(?:wor[k]|roo[t])/|/op[t]/dev|/hom[e]/(?!someone\b)[a-z]\w*",
    "a package registry": r"pythonhoste[d]|index-ur[l]|find-link[s]",
}


def requirements() -> list[Requirement]:
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return [Requirement(line) for lines in lists for line in lines]


def pinned_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pins() -> dict[str, str]:
    pairs = [line.split("==") for line in pinned_lines()]
    return {canonicalize_name(name): version for name, version in pairs}


def wrong_in(requirement: Requirement) -> str:
    """Why a dependency's range and pin would not do; "" where they do."""
    pin = pins().get(canonicalize_name(requirement.name))
    if not requirement.specifier:
        return "has no range"
    if not pin:
        return "has no pin in constraints.txt"
    inside = requirement.specifier.contains(pin, prereleases=True)
    return "" if inside else f"its pin {pin} is outside {requirement.specifier}"


def test_a_dependency_has_a_range_and_a_pin_inside_it():
    found = {str(requirement): wrong_in(requirement) for requirement in requirements()}
    assert len(found) > 30 and {name: wrong for name, wrong in found.items() if wrong} == {}
    planted = [Requirement(line) for line in ("torch", "no-such-package>=1", "torch>=99")]
    assert all(map(wrong_in, planted))


def test_constraints_are_plain_pins_each_once():
    pinned = pinned_lines()
    assert not [line for line in pinned if not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
    assert len(pins()) == len(pinned)
    assert pins()["torch"] == "2.13.0"


def test_conda_and_make_install_the_same_extras_at_the_same_pins():
    conda = (ROOT / "environment.yml").read_text()
    make = (ROOT / "Makefile").read_text()
    by_conda = re.search(r"--editable \.\[([\w,]+)\]", conda).group(1)
    by_make = re.search(r"^EXTRAS \?= ([\w,]+)$", make, re.MULTILINE).group(1)
    assert by_conda == by_make
    assert set(by_conda.split(",")) <= set(PROJECT["optional-dependencies"])
    assert "--constraint constraints.txt" in conda
    assert "-c constraints.txt -e '.[$(EXTRAS)]'" in make


def test_conda_and_make_ask_for_the_python_of_pyproject():
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert f"- python={lowest}\n" in (ROOT / "environment.yml").read_text()
    major, minor = lowest.split(".")
    assert f"sys.version_info >= ({major}, {minor})" in (ROOT / "Makefile").read_text()


def test_the_version_is_one_and_the_changelog_knows_it():
    assert nsa.__version__ == PROJECT["version"]
    assert f"## [{nsa.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_commands_of_the_readme_are_in_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", readme, re.MULTILINE))
    named = {first or second for first, second in named}
    assert {"run", "test"} <= named
    assert named <= targets


def test_the_examples_of_the_readme_run_one_after_the_other():
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)
    assert names["y"].shape == (2, 512, 256)
    assert names["o"].shape == names["q"].shape
    assert names["q"].grad.isfinite().all()


def test_the_readme_is_short():
    assert (ROOT / "README.md").read_text().count("\n") <= 110


def test_a_table_lists_every_backend_in_the_order_of_preference():
    import workbook  # noqa: F401  adds the backend `sequential`
    from nsa.attention.registry import backends

    text = (ROOT / "docs/attention.md").read_text().partition("## Backends")[2].partition("## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", text, re.M)
    assert rows == [(b.name, "yes" if b.quadratic else "no") for b in backends()]


@pytest.mark.processes
def test_links_lead_to_what_a_checkout_holds():
    files = tracked()
    held = files.keys() | {str(folder) for name in files for folder in Path(name).parents}
    lost = []
    for name in sorted(name for name in files if name.endswith(".md")):
        for link in re.findall(r"\]\(([^)\s#]+)", files[name].read_text()):
            to = os.path.normpath(Path(name).parent / link)
            if not re.match(r"[a-z]+:", link) and to not in held:
                lost.append(f"{name}: {link}")
    assert lost == []


def test_headlines_of_the_log_are_short():
    lines = (ROOT / "docs" / "log.md").read_text().splitlines()
    headlines = [line.partition(" · ")[2] for line in lines if line.startswith("## 20")]
    assert headlines and [line for line in headlines if not 0 < len(line) <= 90] == []


@pytest.mark.processes
def test_docstrings_begin_with_a_verb_or_a_noun():
    wrong = []
    for name, path in tracked("nsa/**/*.py", "whyhung/**/*.py", "workbook/**/*.py").items():
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                if re.match("(What|Of|Whether|Those|Who|Where|As|That|Which|How)\\b", first):
                    wrong.append(f"{name}: {first}")
    assert wrong == []


def test_ci_runs_what_the_readme_tells_in_its_order():
    made = re.findall(r"^make (.*)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert " ".join(made).split() == ["run", "lint", "test-all"]


def test_the_readme_says_the_times_of_the_makefile():
    make, readme = (ROOT / "Makefile").read_text(), (ROOT / "README.md").read_text()
    times = re.findall(r"^\w+_TAKES := (.*)$", make, re.MULTILINE)
    assert len(times) == 3
    assert [time for time in times if time not in " ".join(readme.split())] == []


@pytest.mark.parametrize(
    ("group", "name", "target"),
    [(g, *pair) for g, points in ENTRY_POINTS.items() for pair in points.items()],
)
def test_an_entry_point_leads_to_something(group, name, target):
    if group != "console_scripts":
        pytest.importorskip("papermill")
    assert callable(EntryPoint(name, target, group).load())


@pytest.mark.registered
def test_papermill_finds_the_engine_by_its_entry_point():
    try:
        distribution("nsa")
    except PackageNotFoundError:
        pytest.skip("the package is not installed here")
    pytest.importorskip("papermill")
    found = {point.name: point.load() for point in entry_points(group="papermill.engine")}
    from workbook.runs.engine import TruthfulEngine

    assert found["truthful"] is TruthfulEngine


def machine_traces(text: str) -> list[str]:
    return [
        f"{what}: {found.group()}"
        for what, pattern in MACHINE.items()
        for found in re.finditer(pattern, text)
    ]


@pytest.mark.processes
def test_no_tracked_file_tells_of_the_machine_it_was_made_on():
    found = {}
    for name, path in tracked().items():
        content = path.read_bytes()
        if b"\0" not in content[:8192] and (traces := machine_traces(content.decode())):
            found[name] = traces
    assert found == {}


def test_a_trace_of_a_machine_is_seen_and_a_path_that_is_nobodys_is_none():
    traces = "/wor|k/main /roo|t/.cache /hom|e/ann/nsa /op|t/dev/venv files.pythonhoste|d.org "
    for trace in f"{traces} --extra-index-ur|l=x".split():
        assert machine_traces(trace.replace("|", "")), trace
    assert not machine_traces("/usr/bin/env, runs/workbook/rooted, /home/someone/runs, network/x")


@pytest.mark.processes
def test_no_tracked_file_is_large():
    large = {name: n for name, path in tracked().items() if (n := path.stat().st_size) > MAX_BYTES}
    assert large == {}
