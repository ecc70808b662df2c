"""Registry of what is planted: names, due kinds, choices. What each does, the selfcheck judges."""

import importlib
import json
from pathlib import Path

import pytest

from whyhung.process.trial import check_entry
from whyhung.verdict import KINDS
from workbook.rooms.selfcheck import registry
from workbook.rooms.selfcheck.registry import chosen, every, listed, why_not

PLANTED, CONTROLS, ENDS = listed().values()


def named(name):
    (fault,) = chosen([name])
    return fault


def test_there_are_enough_faults_and_controls_for_a_machine_without_a_gpu():
    assert sum(not why_not(fault, gpus=0) for fault in PLANTED) >= 20
    assert sum(not why_not(control, gpus=0) for control in CONTROLS) >= 8


def test_names_are_unique_kinds_exist_and_subjects_can_be_found():
    assert len({fault.name for fault in every()}) == len(every())
    for fault in every():
        assert set(fault.kinds) <= set(KINDS) and fault.kinds
        json.dumps(fault.settings)
        if fault.script:
            assert Path(fault.script).is_file() and fault.script in fault.command and fault.text
            continue
        check_entry(fault.subject)
        module, _, name = fault.subject.partition(":")
        made = importlib.import_module(module)
        assert hasattr(made, name)
        assert all(line in Path(made.__file__).read_text() for line in fault.line.split(" or "))


def test_no_control_may_be_called_a_hang():
    healthy = [fault for fault in every() if fault.control]
    assert not any({"HANG", "STALLED"} & set(fault.kinds) for fault in healthy)
    assert len(healthy) > len(CONTROLS)


def test_each_run_of_a_program_is_a_fault_of_which_only_kinds_are_due():
    first, second = chosen(["gloo_broadcast_alone"])
    assert (first.name, second.command[-1]) == ("gloo_broadcast_alone --loader no", "yes")
    assert (first.due, first.ranks, first.rank) == ("HANG or STALLED", 2, 1)
    assert first.certifiable and first.line == "reload_weights or train_step"
    assert (first.batch, first.needs, first.control) == ("frozen", "", False)
    healthy, _ = chosen(["thread_pool"])
    assert healthy.control and healthy.due == "PASS or SLOW" and healthy.batch == "first"
    assert {fault.needs for fault in chosen(["endless_kernel"])} == {"gpus2"}


def test_where_the_programs_are_missing_it_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "PACKAGE", tmp_path / "nsa")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"not installed with nsa; run it in a clone"):
        registry.folder()


def test_a_choice_is_of_names_groups_and_batches():
    assert {fault.group for fault in chosen(groups=["slow", "fails"])} == {"slow", "fails"}
    assert chosen(["no_number 1", "no_number 0"], ["fails"]) == chosen(["no_number"])
    assert all(fault.batch == "first" for fault in chosen(batches=["first"]))
    with pytest.raises(ValueError, match="nothing is of group"):
        chosen(["no_number"], ["healthy"])


def test_what_needs_two_gpus_says_so_where_there_is_one():
    assert why_not(named("two ranks (NCCL)"), gpus=1) == "needs 2 GPU(s), here are 1"
    assert why_not(named("device OOM"), gpus=1) == ""


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="the nearest is 'gate x 0'"):
        chosen(["gate x 1"])


def test_a_spin_on_a_device_is_bounded():
    from faults.devices import spin

    with pytest.raises(ValueError, match="at most 60"):
        spin(61.0)
