"""The guard over committed notebooks: nbval compares only what this finds worth comparing."""

import re
import tempfile

import nbformat
import pytest
from places import NOTEBOOKS

from workbook.runs.parameters import declared
from workbook.runs.refresh import KERNEL

MAX_BYTES = 500_000
IGNORE_TAG = "nbval-ignore-output"
# A path of some machine, or its name as a prompt or an address shows it.
MACHINE = re.compile(
    r"(?<![\w.~<])/(?:home|root|work|opt|tmp|mnt|usr|Users|var)/[\w.-]+|\bC:\\|\b\w+@[\w-]+:[~/]"
)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def tags(cell) -> set[str]:
    return set(cell.metadata.get("tags", []))


def is_compared(cell) -> bool:
    """True if nbval compares it: counted, not exempt, and with output other than a picture."""
    pictures = {"image/png", "image/jpeg", "text/plain"}  # beside a picture, text/plain is its repr
    shown = [
        output
        for output in cell.outputs
        if output.output_type == "stream"
        or (output.output_type != "error" and not {"image/png"} <= set(output.data) <= pictures)
    ]
    exempt = IGNORE_TAG in tags(cell) or "NBVAL_IGNORE_OUTPUT" in cell.source
    skipped = "nbval-skip" in tags(cell) or "NBVAL_SKIP" in cell.source
    return cell.execution_count is not None and bool(shown) and not exempt and not skipped


def faults_in_parameters(notebook) -> list[str]:
    """Each is `name: type = default  # what it is`, or `nsa run` refuses the notebook."""
    with tempfile.NamedTemporaryFile(suffix=".ipynb") as file:
        nbformat.write(notebook, file.name)
        try:
            declared(file.name)
        except ValueError as error:
            return [str(error)]
    return []


def text_of(notebook) -> str:
    """All that a reader sees, without pictures, whose base64 may spell anything."""
    seen = [cell.source for cell in notebook.cells]
    for output in (output for cell in code_cells(notebook) for output in cell.outputs):
        seen.append(str(output.get("text", "")))
        seen += [str(x) for kind, x in output.get("data", {}).items() if "image" not in kind]
    return "\n".join(seen)


def faults_of(notebook) -> list[str]:
    cells = code_cells(notebook)
    faults = []
    counts = [cell.execution_count for cell in cells]
    if counts != list(range(1, len(cells) + 1)):
        faults.append(f"execution counts are {counts}: run it from top to bottom (make refresh)")
    if any(output.output_type == "error" for cell in cells for output in cell.outputs):
        faults.append("a stored error")
    faults += faults_in_parameters(notebook)
    if not any(is_compared(cell) for cell in cells):
        faults.append("nothing to compare: no cell with output is free of " + IGNORE_TAG)
    faults += [f"a machine's own path or name: {m}" for m in MACHINE.findall(text_of(notebook))]
    size = len(nbformat.writes(notebook).encode())
    if size > MAX_BYTES:
        faults.append(f"{size} bytes, at most {MAX_BYTES}: store smaller figures")
    return faults


def test_there_are_notebooks():
    assert list(NOTEBOOKS.glob("*.ipynb")), f"none in {NOTEBOOKS.name}/: nbval has nothing to run"


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_committed_notebook_is_executed_typed_and_compared(path):
    assert faults_of(nbformat.read(path, as_version=4)) == []


@pytest.fixture
def good():
    """A small notebook without a fault."""
    v4 = nbformat.v4
    stream = v4.new_output("stream", text="shape (2, 3)\n")
    table = v4.new_output("execute_result", {"text/plain": "0.123"}, execution_count=2)
    parameters = "tokens: int = 128  # tokens in a sequence\nkeep: bool = True  # keep the trials"
    cells = [
        v4.new_markdown_cell("# A question"),
        v4.new_code_cell(parameters, execution_count=1, metadata={"tags": ["parameters"]}),
        v4.new_code_cell(
            "rows", execution_count=2, outputs=[table], metadata={"tags": [IGNORE_TAG]}
        ),
        v4.new_code_cell("print(facts)", execution_count=3, outputs=[stream]),
    ]
    return v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})


def error():
    return nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[])


def picture():
    data = {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure size 640x480>"}
    return nbformat.v4.new_output("display_data", data)


# What is done to the cells (1: parameters, 2: rows, which nbval ignores, 3: facts), what is said.
SPOILT = {
    "all exempt": (lambda c: c[3].metadata.update(tags=[IGNORE_TAG]), "nothing to compare"),
    "exempt by a comment": (
        lambda c: c[3].update(source="# NBVAL_IGNORE_OUTPUT\nprint(facts)"), "nothing to compare",
    ),
    "only a picture": (lambda c: c[3].update(outputs=[picture()]), "nothing to compare"),
    "no outputs": (
        lambda c: [cell.update(outputs=[]) for cell in c[1:]], "nothing to compare",
    ),
    "no counts, so out of order": (
        lambda c: [cell.update(execution_count=None) for cell in c[1:]], "execution counts",
    ),
    "no counts, so not compared": (
        lambda c: [cell.update(execution_count=None) for cell in c[1:]], "nothing to compare",
    ),
    "run twice": (lambda c: c[3].update(execution_count=4), "execution counts"),
    "an error": (lambda c: c[2].update(outputs=[error()]), "a stored error"),
    "no tag": (lambda c: c[1].metadata.update(tags=[]), "0 cells tagged"),
    "two tags": (lambda c: c[2].metadata.update(tags=["parameters"]), "2 cells tagged"),
    "no annotation": (
        lambda c: c[1].update(source="tokens = 128  # tokens in a sequence"), "cannot read",
    ),
    "no comment": (
        lambda c: c[1].update(source="# tokens in a sequence\ntokens: int = 128"),
        "has no comment",
    ),
    "a path": (
        lambda c: c[3].outputs[0].update(text="kept in /home/someone/runs/1"),
        "own path or name: /home/someone",
    ),
    "a prompt": (
        lambda c: c[0].update(source="someone@node17:~$ nsa run"),
        "own path or name: someone@node17",
    ),
    "too large": (
        lambda c: c[2].outputs[0].data.update({"image/svg+xml": "x" * MAX_BYTES}),
        "at most 500000",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "expected"), SPOILT.values(), ids=SPOILT)
def test_the_guard_passes_a_good_notebook_and_stops_a_spoilt_one(good, spoil, expected):
    assert faults_of(good) == []
    spoil(good.cells)
    assert any(expected in fault for fault in faults_of(good))
