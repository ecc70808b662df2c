"""The guard over committed notebooks: nbval compares only what this finds worth comparing."""

import ast
import copy
import io
import re
import tokenize

import pytest
from places import NOTEBOOKS

nbformat = pytest.importorskip("nbformat")

FOLDER = NOTEBOOKS
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
    """Whether nbval compares it: counted, not exempt, and with output other than a picture."""
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


def faults_in_parameters(cell) -> list[str]:
    """Each is `name: type = default  # what it is`: papermill takes types and help from there."""
    reader = io.StringIO(cell.source).readline
    commented = {
        token.start[0]
        for token in tokenize.generate_tokens(reader)
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip()
    }
    faults = []
    for statement in ast.parse(cell.source).body:
        name = ast.unparse(statement).split("\n")[0]
        if not isinstance(statement, ast.AnnAssign) or statement.value is None:
            faults.append(f"parameter without annotation or default: {name}")
        elif statement.end_lineno not in commented:
            faults.append(f"parameter without comment: {name}")
    return faults


def text_of(notebook) -> str:
    """All that a reader sees, without pictures, whose base64 may spell anything."""
    seen = [cell.source for cell in notebook.cells]
    for cell in code_cells(notebook):
        for output in cell.outputs:
            seen.append(str(output.get("text", "")))
            seen += [
                str(data) for kind, data in output.get("data", {}).items() if "image" not in kind
            ]
    return "\n".join(seen)


def faults_of(notebook) -> list[str]:
    cells = code_cells(notebook)
    faults = []
    counts = [cell.execution_count for cell in cells]
    if counts != list(range(1, len(cells) + 1)):
        faults.append(f"execution counts are {counts}: run it from top to bottom (make refresh)")
    if any(output.output_type == "error" for cell in cells for output in cell.outputs):
        faults.append("a stored error")
    parameters = [cell for cell in cells if "parameters" in tags(cell)]
    if len(parameters) != 1:
        faults.append(f"{len(parameters)} cells tagged parameters, 1 is needed")
    faults += [fault for cell in parameters for fault in faults_in_parameters(cell)]
    if not any(is_compared(cell) for cell in cells):
        faults.append("nothing to compare: no cell with output is free of " + IGNORE_TAG)
    faults += [f"a machine's own path or name: {m}" for m in MACHINE.findall(text_of(notebook))]
    size = len(nbformat.writes(notebook).encode())
    if size > MAX_BYTES:
        faults.append(f"{size} bytes, at most {MAX_BYTES}: store smaller figures")
    return faults


def test_there_are_notebooks():
    assert sorted(FOLDER.glob("*.ipynb")), (
        f"no notebook in {FOLDER.name}/: nbval has nothing to run"
    )


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
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
    return v4.new_notebook(cells=cells)


def test_the_guard_passes_a_good_notebook(good):
    assert faults_of(good) == []


def exempt_all(cells):
    cells[3].metadata.tags = [IGNORE_TAG]


def exempt_by_comment(cells):
    cells[3].source = "# NBVAL_IGNORE_OUTPUT\nprint(facts)"


def leave_only_a_picture(cells):
    data = {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure size 640x480>"}
    cells[3].outputs = [nbformat.v4.new_output("display_data", data)]


def strip_outputs(cells):
    for cell in cells[1:]:
        cell.outputs = []


def strip_counts(cells):
    for cell in cells[1:]:
        cell.execution_count = None


def run_twice(cells):
    cells[3].execution_count = 4


def store_an_error(cells):
    cells[2].outputs = [
        nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[])
    ]


def untag(cells):
    cells[1].metadata.tags = []


def tag_two(cells):
    cells[2].metadata.tags = ["parameters"]


def drop_an_annotation(cells):
    cells[1].source = "tokens = 128  # tokens in a sequence"


def drop_a_comment(cells):
    cells[1].source = "# tokens in a sequence\ntokens: int = 128"


def print_a_path(cells):
    cells[3].outputs[0].text = "kept in /home/someone/runs/1"


def print_a_prompt(cells):
    cells[0].source = "someone@node17:~$ nsa run"


def grow(cells):
    cells[2].outputs[0].data["image/svg+xml"] = "x" * MAX_BYTES


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (exempt_all, "nothing to compare"),
        (exempt_by_comment, "nothing to compare"),
        (leave_only_a_picture, "nothing to compare"),
        (strip_outputs, "nothing to compare"),
        (strip_counts, "execution counts"),
        (strip_counts, "nothing to compare"),
        (run_twice, "execution counts"),
        (store_an_error, "a stored error"),
        (untag, "0 cells tagged parameters"),
        (tag_two, "2 cells tagged parameters"),
        (drop_an_annotation, "without annotation"),
        (drop_a_comment, "without comment"),
        (print_a_path, "own path or name: /home/someone"),
        (print_a_prompt, "own path or name: someone@node17"),
        (grow, "at most 500000"),
    ],
)
def test_the_guard_stops_a_spoilt_notebook(good, spoil, expected):
    spoilt = copy.deepcopy(good)
    spoil(spoilt.cells)
    assert any(expected in fault for fault in faults_of(spoilt))
