"""Refreshing executes a notebook here, keeps what nbval compares, and spoils nothing."""

import base64
import io
import json
import sys

import nbformat
import pytest
from papermill.exceptions import PapermillExecutionError
from PIL import Image, ImageChops

from workbook.runs.refresh import main


def written(path, *sources):
    v4 = nbformat.v4
    cells = [v4.new_code_cell(source, metadata={"collapsed": True}) for source in sources]
    nbformat.write(v4.new_notebook(cells=cells, metadata={"widgets": {}}), path)
    return path


@pytest.fixture
def foreign_kernel(tmp_path, monkeypatch):
    """A user's own `python3` kernel that would win over ours, were it asked for by name."""
    folder = tmp_path / "jupyter" / "kernels" / "python3"
    folder.mkdir(parents=True)
    spec = {"argv": ["/bin/false"], "display_name": "broken", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))


@pytest.mark.processes
@pytest.mark.full
def test_a_refreshed_notebook_ran_on_this_interpreter_and_is_clean(tmp_path, foreign_kernel):
    path = written(tmp_path / "n.ipynb", "import sys; sys.executable", "import os; os.getcwd()")
    assert main(["--check", str(path)]) == 1
    assert main([str(path)]) == 0
    assert main(["--check", str(path)]) == 0
    notebook = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in notebook.cells] == [1, 2]
    shown = [cell.outputs[0].data["text/plain"] for cell in notebook.cells]
    assert shown == [repr(sys.executable), repr(str(tmp_path))]
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    assert "version" not in notebook.metadata.language_info
    once = path.read_bytes()
    main([str(path)])
    assert path.read_bytes() == once, "refreshing twice changes something"


@pytest.mark.processes
@pytest.mark.full
def test_plots_are_kept_with_few_colours(tmp_path):
    plot = "from PIL import Image; from IPython.display import display; "
    plot += "display(Image.radial_gradient('L').convert('RGB').resize((600, 400)))"
    path = written(tmp_path / "n.ipynb", plot)
    main([str(path)])
    (output,) = nbformat.read(path, as_version=4).cells[0].outputs
    png = base64.b64decode(output.data["image/png"])
    kept = Image.open(io.BytesIO(png))
    assert kept.size == (600, 400) and kept.mode == "P"
    drawn = Image.radial_gradient("L").convert("RGB").resize((600, 400))
    far = ImageChops.difference(kept.convert("RGB"), drawn).getextrema()
    assert max(high for _, high in far) <= 16


@pytest.mark.full
@pytest.mark.processes
def test_a_failing_cell_leaves_the_notebook_as_it_was(tmp_path):
    path = written(tmp_path / "n.ipynb", "1 + 1", "1 / 0")
    before = path.read_bytes()
    with pytest.raises(PapermillExecutionError, match="ZeroDivisionError"):
        main([str(path)])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.processes
@pytest.mark.full
def test_cleaning_executes_nothing_and_a_missing_notebook_is_refused_by_name(tmp_path, capsys):
    path = written(tmp_path / "n.ipynb", "1 + 1")
    assert main(["--clean", str(path)]) == 0
    assert nbformat.read(path, as_version=4).cells[0].execution_count is None
    assert main(["--check", str(path)]) == 0
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none.ipynb")])
    assert "none.ipynb" in capsys.readouterr().err
