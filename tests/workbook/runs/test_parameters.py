import pytest
from sample_notebooks import PARAMETERS, write_notebook

from workbook.runs.parameters import (
    check,
    check_together,
    declared,
    filled,
    of_kernel,
    parse,
    read_file,
    table,
)  # fmt: skip


@pytest.fixture
def known(tmp_path):
    return declared(write_notebook(tmp_path / "tiny.ipynb", "1"))


def test_types_defaults_and_help_come_from_the_parameters_cell(known):
    assert known["layers"].type == "int" and known["layers"].default == 2
    assert known["lengths"].type == "list[int]" and known["lengths"].default == [128, 256]
    assert known["precision"].default == "fp32" and known["deep"].default is False
    assert known["rate"].help == "learning rate"
    assert "lengths: list[int] = 128,256" in table(known) and "learning rate" in table(known)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("layers = 2  # no type", "cannot read the parameter line"),
        ("layers: int = 2", "has no comment"),
        ("layers: complex = 2  # odd", "type complex"),
        ("layers: int = len('a')  # computed", "must be a literal"),
        ("layers, heads: int = 2  # two", "line 1 of its parameters"),
        ("layers: int  # no default", "cannot read the parameter line"),
        ("layers: int = 'two'  # wrong default", "wants int"),
        ("layers: int = 90  # how many (1..64)", "outside 1..64"),
        (None, "0 cells tagged"),
    ],
)
def test_a_parameters_cell_that_cannot_be_checked_is_refused(tmp_path, cell, message):
    notebook = write_notebook(tmp_path / "bad.ipynb", parameters=cell)
    with pytest.raises(ValueError, match=message):
        declared(notebook)


def test_a_default_may_take_lines_and_a_comment_any_sign(tmp_path):
    cell = (
        "factors: dict = {\n    'a': [1],  # inner\n}  # with x=1 inside\nname: str = 'a=#b'  # its"
    )
    found = declared(write_notebook(tmp_path / "signs.ipynb", parameters=cell))
    assert [(p.default, p.help) for p in found.values()] == [
        ({"a": [1]}, "inner with x=1 inside"),
        ("a=#b", "its"),
    ]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("4", "int", 4),
        (" -4 ", "int", -4),
        ("1e3", "float", 1000.0),
        ("true", "bool", True),
        ("False", "bool", False),
        ("cpu", "str", "cpu"),
        ("'a b'", "str", "a b"),
        ("128,256", "list[int]", [128, 256]),
        ("[128, 256]", "list[int]", [128, 256]),
        ("512", "list[int]", [512]),
        ("[]", "list[int]", []),
        ("gather, sdpa", "list[str]", ["gather", "sdpa"]),
        ("0.5,1", "list[float]", [0.5, 1.0]),
        ("""["a=1,b=2", 'c,d', e]""", "list[str]", ["a=1,b=2", "c,d", "e"]),
    ],
)
def test_command_line_text_becomes_a_value(text, kind, value):
    found = parse(text, kind)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layer", 3, "unknown parameter 'layer'; the nearest is 'layers'"),
        ("zzzzzz", 3, "known are layers, rate"),
        ("layers", 0, r"layers=0 is outside 1\.\.64"),
        ("layers", 65, r"layers=65 is outside 1\.\.64"),
        ("lengths", [128, 8], r"lengths=8 is outside 16\.\.inf"),  # a range is for each member
        ("precision", "bf61", "known are fp32, bf16"),
        ("layers", "ten", r"layers wants .*got .*'ten' \(str\); for example layers=4"),
        ("layers", True, r"layers wants .*got .*True \(bool\)"),
        ("layers", 2.0, r"layers wants .*got .*2.0 \(float\)"),
        ("rate", True, r"rate wants .*got .*True \(bool\)"),
        ("rate", "x", "rate wants .*got .*'x'"),
        ("deep", 1, r"deep wants .*got .*1 \(int\); for example deep=true"),
        ("lengths", 128, r"lengths wants .*got .*128 \(int\); for example lengths=128,256"),
        ("lengths", [128, "x"], r"lengths wants .*got .*'x' \(str\)"),
        ("lengths", "128", "lengths wants .*got .*'128'"),
        ("names", [1], r"names wants .*got .*1 \(int\)"),
        ("precision", None, "precision wants .*got .*None"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_it_got_and_what_would(known, name, value, message):
    with pytest.raises(ValueError, match=message):
        check(known, {name: value})


def test_an_int_serves_as_a_float_a_range_has_its_ends_and_the_rest_its_default(known):
    found = check(known, {"rate": 1})["rate"]
    assert found == 1.0 and isinstance(found, float)
    assert check(known, {"layers": 64}) == {"layers": 64}
    assert check(known, {"layers": 1}) == {"layers": 1}
    full = filled(known, {"layers": 3})
    assert list(full) == list(known) and full["layers"] == 3
    assert {full[name] == known[name].default for name in known if name != "layers"} == {True}


def test_a_parameter_file_is_a_mapping_of_names(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("layers: 4\nlengths: [128, 256]\n")
    assert read_file(file) == {"layers": 4, "lengths": [128, 256]}
    file.write_text("# nothing yet\n")
    assert read_file(file) == {}
    with pytest.raises(ValueError, match=r"cannot read .*gone\.yaml"):
        read_file(tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"layers: 4\nlengths: [128, 256\nrate: 1\n", "line 3 is not YAML"),
        (b"layers: 4\n\trate: 1\n", "line 2 is not YAML"),
        (b"- layers\n- rate\n", "holds a list, not a mapping"),
        (b"just words\n", "holds a str, not a mapping"),
        (b"1: 2\n", "not a mapping"),
        (b"\x89PNG\xff\xfe\x00", "not a text file"),
    ],
)
def test_a_file_that_is_no_yaml_mapping_is_refused(tmp_path, content, message):
    file = tmp_path / "p.yaml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_file(file)


def test_a_mapping_and_a_list_of_anything_are_read_as_yaml(tmp_path):
    cell = 'plan: dict = {\n    "layers": [1, 2],\n}  # of factors\nrules: list = []  # what holds'
    found = declared(write_notebook(tmp_path / "plans.ipynb", parameters=cell))
    assert found["plan"].default == {"layers": [1, 2]}
    assert parse("{layers: [1, 2], data: text}", "dict") == {"layers": [1, 2], "data": "text"}
    assert parse("[{layers: 1}, finite]", "list") == [{"layers": 1}, "finite"]
    given = {"plan": {"tokens": [8]}, "rules": ["finite"]}
    assert check(found, given) == given
    for wrong in ({"plan": [1]}, {"plan": parse("{layers", "dict")}, {"rules": {}}):
        with pytest.raises(ValueError, match=r"wants (dict|list), got .*; for example"):
            check(found, wrong)


def even(values):
    """The check of a room."""
    if any(length % 2 for length in values["lengths"]):
        raise ValueError(f"lengths={values['lengths']} must be even")


CHECKED = f"# checked by {__name__}:even\n{PARAMETERS}"


def test_the_room_that_a_parameters_cell_names_checks_all_values_together(tmp_path):
    notebook = write_notebook(tmp_path / "checked.ipynb", parameters=CHECKED)
    assert declared(notebook)["layers"].default == 2
    check_together(notebook)({"lengths": [128, 16]})
    with pytest.raises(ValueError, match=r"lengths=\[128, 17\] must be even"):
        check_together(notebook)({"lengths": [128, 17]})


def kernel(*cells):
    """Values of globals() after these cells were run."""
    namespace = {"In": ["", *cells]}
    for cell in cells:
        exec(cell, namespace)
    return namespace


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        # as plain papermill writes them for `-p lengths 0`, `-p precision bf61`, `-p layer 3`
        ("# Parameters\nlengths = 0\n", r"lengths wants list\[int\], got 0 \(int\)"),
        ('# Parameters\nprecision = "bf61"\n', "known are fp32, bf16"),
        ("# Parameters\nlayer = 3\n", "unknown parameter 'layer'; the nearest is 'layers'"),
        ("# Parameters\nlengths = [17]\n", r"lengths=\[17\] must be even"),
        # a person edits the cell in JupyterLab
        (CHECKED.replace("[128, 256]", "[8]"), r"lengths=8 is outside 16\.\.inf"),
    ],
)
def test_a_kernel_that_nobody_checked_refuses_the_same(cell, message):
    given = of_kernel(kernel(CHECKED, "import os", "# Parameters\nlayers = 3\n"))
    assert given["layers"] == 3 and given["lengths"] == [128, 256]
    with pytest.raises(ValueError, match=message):
        of_kernel(kernel(CHECKED, cell))


def test_a_kernel_without_a_parameters_cell_says_what_to_run():
    with pytest.raises(ValueError, match="run the notebook from its top"):
        of_kernel(kernel("layers = 2"))


def test_a_kernel_that_keeps_no_history_runs_unchecked():
    assert of_kernel({"In": [""], "layers": 2}) == {}
