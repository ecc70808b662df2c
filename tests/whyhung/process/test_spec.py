"""What a trial is: its spec, its id, its rerun, entries that moved; and what is out of memory."""

import importlib
import re

import pytest
from places import tracked

import workbook.lab
from whyhung.process import renamed
from whyhung.process.child import is_out_of_memory
from whyhung.process.procfs import kernel_kills
from whyhung.process.runner import Spec


def test_the_same_spec_source_and_environment_have_the_same_id():
    spec = Spec("a:b", {"x": 1}, oracles=["finite"])
    assert spec == Spec.from_dict(spec.to_dict()) and len(spec.id("s", {})) == 12
    assert spec.id("s", {}) == Spec.from_dict(spec.to_dict()).id("s", {})
    others = [spec.id("t", {}), spec.id("s", {"torch": "3"}), Spec("a:b", {"x": 2}).id("s", {})]
    assert len({spec.id("s", {}), *others}) == 4


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"ranks": 0}, "ranks=0 must be at least 1"),
        ({"settings": {"a": {1}}}, "must fit JSON"),
    ],
)
def test_a_spec_that_cannot_be_run_is_refused(values, said):
    with pytest.raises(ValueError, match=said):
        Spec("a:b", **values)


def test_every_moved_module_is_there():
    lost = {}
    for new in renamed.MOVED.values():
        try:
            importlib.import_module(new)
        except ImportError as error:
            lost[new] = str(error)
    assert workbook.lab and renamed.MOVED and lost == {}


def test_a_stored_spec_runs_the_subject_where_it_is_now():
    spec = Spec.from_dict({"subject": "nsa.lab.exhibits.subject:make", "steps": 2})
    assert spec.subject == "workbook.rooms.case_study.loop.subject:make"


def test_what_never_moved_stays_as_it_is():
    for entry in ("my.module:make", "workbook.lab.plansx:make", "whyhung.process.ranks:launch"):
        assert renamed.current(entry) == entry
    assert (
        renamed.current("nsa.lab.plans.calibration:make") == "workbook.lab.search.calibration:make"
    )


@pytest.mark.processes
def test_every_entry_that_a_committed_run_names_is_found():
    found = set()
    for file in tracked("runs/**/*.json").values():
        found |= set(re.findall(r"\b(?:nsa|whyhung)\.[a-z_.]+:[a-z_]+", file.read_text()))
    for entry in found:
        module, _, name = renamed.current(entry).partition(":")
        assert hasattr(importlib.import_module(module), name), entry


def test_an_ordinary_error_is_not_out_of_memory():
    assert not is_out_of_memory(RuntimeError("out of order"))
    assert not is_out_of_memory(ValueError("the manual says 'out of memory'"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))


@pytest.mark.parametrize(
    ("membership", "file"),
    [
        ("0::/box\n", "box/memory.events"),
        ("0::/seen/from/outside\n", "memory.events"),
        ("5:cpu:/\n4:memory:/box\n0::/\n", "memory/box/memory.oom_control"),
    ],
)
def test_kills_are_read_from_both_kinds_of_control_group(tmp_path, membership, file):
    (tmp_path / "membership").write_text(membership)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("under_oom 0\noom_kill 7\n")
    assert kernel_kills(tmp_path, tmp_path / "membership") == 7
    assert kernel_kills(tmp_path, tmp_path / "missing") is None
