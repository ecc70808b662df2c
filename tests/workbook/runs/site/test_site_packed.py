"""Files that a build leaves for the next one: packed as one, and not believed where damaged."""

import shutil

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
    work = build._unpacked(home)
    assert held(work) == {}
    (work / "source").mkdir()
    (work / "source" / "page.md").write_text(TEXT)
    (work / "made").write_text("0123")
    build._pack(home, changed=True)
    return home


def held(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_what_was_left_is_one_small_file_and_comes_back_with_its_dates(home, tmp_path):
    assert {path.name for path in home.iterdir()} == {"lock", build.KEPT}
    assert (home / build.KEPT).stat().st_size < len(TEXT) / 10
    work = build._unpacked(home)
    assert held(work) == {"source/page.md": TEXT, "made": "0123"}
    page = work / "source" / "page.md"
    before = page.stat().st_mtime
    build._pack(home, changed=True)
    # Sphinx compares dates in microseconds
    assert abs((build._unpacked(home) / "source" / "page.md").stat().st_mtime - before) < 1e-6


def test_nothing_is_packed_again_where_nothing_changed(home):
    before = (home / build.KEPT).stat().st_mtime_ns
    build._unpacked(home)
    build._pack(home, changed=False)
    assert (home / build.KEPT).stat().st_mtime_ns == before
    assert {path.name for path in home.iterdir()} == {"lock", build.KEPT}


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6])
def test_a_damaged_file_is_as_none(home, part):
    whole = (home / build.KEPT).read_bytes()
    (home / build.KEPT).write_bytes(whole[: int(len(whole) * part)])
    assert held(build._unpacked(home)) == {}


def test_what_a_failed_build_left_open_is_taken_up_and_half_removed_or_older_things_go(home):
    work = build._unpacked(home)
    (work / "made").write_text("newer")
    shutil.copytree(work, home / "part")
    shutil.copytree(work, home / "gone")
    (home / "doctrees").mkdir()  # as earlier versions had it
    (home / "made").write_text("old")
    assert held(build._unpacked(home))["made"] == "newer"
    assert {path.name for path in home.iterdir()} == {"lock", build.KEPT, build.OPEN}
