"""Files that a build leaves for the next one: packed as one, and not believed where damaged."""

import pytest

from workbook.runs.site import build

pytest.importorskip("jinja2")
TEXT = "<svg>" + "a figure, " * 4000 + "</svg>"


@pytest.fixture
def home(tmp_path):
    """The folder of a site's leavings, with a lock, after a build that left two files."""
    home = tmp_path / "site" / build.WORK
    home.mkdir(parents=True)
    (home / "lock").touch()
    with build._unpacked(home) as work:
        assert held(work) == {}
        (work / "source").mkdir()
        (work / "source" / "page.md").write_text(TEXT)
        (work / "made").write_text("0123")
        build._pack(home)
    return home


def held(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_what_was_left_is_one_small_file_and_comes_back_with_its_dates(home):
    assert {path.name for path in home.iterdir()} == {"lock", build.KEPT}
    assert (home / build.KEPT).stat().st_size < len(TEXT) / 10
    with build._unpacked(home) as work:
        assert held(work) == {"source/page.md": TEXT, "made": "0123"}
        before = (work / "source" / "page.md").stat().st_mtime
        build._pack(home)
    with build._unpacked(home) as work:  # Sphinx compares dates in microseconds
        assert abs((work / "source" / "page.md").stat().st_mtime - before) < 1e-6


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6])
def test_a_damaged_file_is_as_none(home, part):
    whole = (home / build.KEPT).read_bytes()
    (home / build.KEPT).write_bytes(whole[: int(len(whole) * part)])
    with build._unpacked(home) as work:
        assert held(work) == {}


def test_after_a_build_that_was_ended_nothing_is_believed_and_older_things_go(home):
    (home / "doctrees").mkdir()  # as earlier versions had it
    (home / "made").write_text("old")
    with build._unpacked(home) as work:
        assert held(work)["made"] == "0123"
    assert {path.name for path in home.iterdir()} == {"lock", build.KEPT}
    (home / build.OPEN).mkdir()
    with build._unpacked(home) as work:
        assert held(work) == {}
