"""Numbers of the documents equal their run's, and each is bound to one or says why it is not."""

import re

import pytest

pytest.importorskip("yaml")
pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
import doc_numbers
from doc_numbers import Binding, Shown
from places import ROOT, UNKNOWN, in_git

if not in_git():
    pytest.skip(UNKNOWN, allow_module_level=True)
BINDINGS = doc_numbers.bindings()
# Bound to a run, stated, and neither: a number that is written or bound changes them.
COUNTED = {
    "README.md": (9, 2, 0),
    "docs/results.md": (199, 14, 0),
    "docs/quality.md": (255, 47, 0),
    "whyhung/README.md": (46, 66, 0),
    "docs/memory.md": (4, 12, 0),
    "docs/kernels.md": (117, 957, 0),
    "docs/generate.md": (27, 6, 0),
    "docs/coverage.md": (32, 0, 63),  # of its notes; most others are sizes and counts of rows
}


def test_every_number_is_its_runs():
    wrong = {one.name: why for one in BINDINGS if (why := unlike(one))}
    assert BINDINGS and wrong == {}


def unlike(binding):
    """Explain how the numbers of a binding differ from what they are bound to; "" if they do not,
    so that one loop names every wrong binding and not the first alone."""
    try:
        shown = binding.shown()
        if not shown:
            return "no number stands there"
        if "stated" in binding.entry:
            return "" if len(binding.entry["stated"]) > 3 else "why it is stated is not said"
        pairs = list(zip(shown, binding.values(), strict=True))
        differing = [(one.text, value) for one, value in pairs if not one.is_of(value)]
        return str(differing) if differing else ""
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("document", COUNTED)
def test_no_number_is_without_a_source(document):
    found = doc_numbers.coverage(document)
    text = doc_numbers.read(document)
    lines = [f"{text.count(chr(10), 0, one.begin) + 1}: {one.text}" for one in found["open"]]
    assert tuple(map(len, found.values())) == COUNTED[document], lines


def test_every_document_with_bindings_is_counted_and_every_run_bound_is_cited():
    assert {one.document for one in BINDINGS} == set(COUNTED)
    for one in BINDINGS:
        runs = re.findall(r"'run': '([^'/]+)", str(one.entry))
        text = doc_numbers.read(one.document)
        assert [run for run in runs if run.rpartition("-")[2] not in text and run not in text] == []


def test_a_changed_digit_of_the_document_is_noticed(monkeypatch):
    binding = next(one for one in BINDINGS if "{} GiB | {} GiB" in one.name)
    text = doc_numbers.read(binding.document)
    monkeypatch.setattr(doc_numbers, "read", lambda document: text.replace("4.39 GiB", "4.38 GiB"))
    shown = [
        one for one, v in zip(binding.shown(), binding.values(), strict=True) if not one.is_of(v)
    ]
    assert [one.text for one in shown] == ["4.38"]


def test_a_number_that_is_not_bound_is_noticed(monkeypatch):
    text = doc_numbers.read("docs/memory.md") + "\nNow it takes 17.3 ms, as T 2048 did at HQ 64.\n"
    monkeypatch.setattr(doc_numbers, "read", lambda document: text)
    assert [one.text for one in doc_numbers.coverage("docs/memory.md")["open"]] == ["17.3"]


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("1.54", 1.5449, True),
        ("1.54", 1.5351, True),
        ("1.54", 1.546, False),
        ("4.50", 4.4948, False),
        ("363,200", 363_178.4, True),
        ("363,200", 363_100.0, False),
        ("33.0", 33.04, True),
        ("0.970", 0.9704, True),
        ("21", 21.4, True),
        ("0", 0.6, False),
    ],
)
def test_a_number_holds_to_its_last_digit(text, value, holds):
    assert Shown(text, 0).is_of(value) is holds


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"text": "no such {} text", "run": "x"}, "stands there 0 times"),
        ({"text": "{} GiB |", "run": "x"}, "times, not once"),
    ],
)
def test_a_text_that_does_not_stand_there_once_is_refused(entry, complaint):
    with pytest.raises(ValueError, match=complaint):
        Binding("docs/results.md", entry).shown()


def test_a_number_of_several_json_rows_is_their_least_most_or_mean():
    asked = {"run": "13_quality-83cc776a/rows", "variant": "nsa", "column": "curve.7.0"}
    seeds = [doc_numbers.value(asked | {"seed": seed, "column": "bits"}) for seed in range(3)]
    found = [doc_numbers.value(asked | {"column": "bits", how: True}) for how in ("least", "most")]
    assert found == [min(seeds), max(seeds)]
    mean = doc_numbers.value(asked | {"column": "bits", "mean": True})
    assert mean == pytest.approx(sum(seeds) / 3)
    assert doc_numbers.value(asked | {"mean": True}) == 393707320
    with pytest.raises(ValueError, match="0 rows have"):  # only dense attention's rows have it
        doc_numbers.value(asked | {"column": "coverage.0.nsa.far", "mean": True})


def test_rows_that_are_several_or_none_are_refused():
    asked = {"run": "01_memory_scaling-28623959", "metric": "peak_memory"}
    with pytest.raises(ValueError, match="rows have"):
        doc_numbers.value(asked)
    with pytest.raises(ValueError, match="0 rows have"):
        doc_numbers.value(asked | {"backend": "none"})
    assert (ROOT / "docs/numbers.yaml").is_file()
