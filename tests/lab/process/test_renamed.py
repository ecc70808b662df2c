"""Records of earlier runs name modules where they were; each is found where it is today."""

import importlib
import re

import pytest
from places import ROOT

from nsa.lab.process import renamed
from nsa.lab.process.runner import Spec


@pytest.mark.parametrize("new", renamed.MOVED.values())
def test_every_moved_module_is_there(new):
    importlib.import_module(new)


def test_a_stored_spec_runs_the_subject_where_it_is_now():
    spec = Spec.from_dict({"subject": "nsa.lab.exhibits.subject:make", "steps": 2})
    assert spec.subject == "nsa.experiments.case_study.loop.subject:make"


def test_what_never_moved_stays_as_it_is():
    for entry in ("my.module:make", "nsa.lab.plansx:make", "nsa.lab.process.ranks:launch"):
        assert renamed.current(entry) == entry
    assert renamed.current("nsa.lab.plans.calibration:make") == "nsa.lab.search.calibration:make"


def test_every_entry_that_a_committed_run_names_is_found():
    found = set()
    for file in (ROOT / "runs").rglob("*.json"):
        found |= set(re.findall(r"\bnsa\.[a-z_.]+:[a-z_]+", file.read_text()))
    for entry in found:
        module, _, name = renamed.current(entry).partition(":")
        assert hasattr(importlib.import_module(module), name), entry
