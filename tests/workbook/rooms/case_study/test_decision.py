"""Decisions from stored runs: what each answer, rule and threshold makes of made-up evidence."""

import re
from functools import partial
from pathlib import Path

import pytest
from places import NOTEBOOKS, ROOT
from stored_runs import store_run

pytest.importorskip("pandas")

from workbook.cli import main as cli
from workbook.rooms.case_study import answers, decision
from workbook.runs import age
from workbook.runs.results import Stored, open_stored

TRACED = (
    "all 9 trials ended, or were refused, on every rank",
    "each branch alone is another program than all three: 4 first losses",
    "a static graph trains the same as DDP without it: losses of 3 steps to 1e-05",
    *(
        f"{b} alone: a gradient for each of 9 parameters on all 2 ranks"
        for b in ("cmp", "slc", "win")
    ),
    "ddp: a gradient for each of 9 parameters on all 2 ranks, in one order",
)
RIGHT = (
    "no query of any branch sees a later token",
    "8 backends hold the accuracy rule in 621 tensors",
    "the rule turns down all zero",
)
TRAINED = ("each of 10 training cells ran or said why it does not",
           "the 2 attentions that ran are 2 different programs")  # fmt: skip
JUDGED = ("healthy ones called HANG, none wanted: 0 of 109 at load 1",)
COMPARED = ("the 7 backends that ran are 7 different programs",)
PEAKS = ("01", "training_step"), ("04", "training")
SIZED = {"preset": "production", "layers": 12, "batch": 1, "attention": "nsa"}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing has changed since the runs of made-up commits; their folders are known by now."""
    monkeypatch.setattr(age, "since", lambda commit, at="HEAD": age.Age(commit, 0))


@pytest.mark.parametrize(
    ("old", "told"),
    [
        (age.Age("c" * 40, 3, 20, 1), "of cccccccccccc: 3 commits with 20 lines more and 1 less"),
        (age.Age("c" * 40), "which git has not here"),
        (age.Age(""), "of no known commit"),
    ],
)
def test_evidence_of_other_code_or_of_nobody_knows_which_is_no_go(tmp_path, monkeypatch, old, told):
    monkeypatch.setattr(age, "since", lambda commit, at="HEAD": old)
    rules = decision.go(today(tmp_path), "today")
    assert decision.verdict(rules) == "UNDECIDED"
    (right,) = [rule for rule in rules if rule.answer.holds is None]
    assert right.rule == "attention is attention" and "STALE, no query" in str(right)
    assert all(told in rule.ages[0] for rule in rules)
    refuted = decision.go(today(tmp_path / "other", failing=RIGHT[0]), "today")
    assert decision.verdict(refuted) == "NO-GO"  # what was wrong is not mended by its age


def row(operation, metric, median, tokens=2048, backend="triton", mode="step", **config):
    place = {"operation": operation, "backend": backend, "mode": mode, "x_name": "tokens"}
    return place | {"metric": metric, "median": median, "x_value": tokens, "config": config}


def today(root, failing="", missing="", *, gib=10.0, rate=26_000.0):
    """Every run that today's system is decided on; one sentence refuted, or one run left out."""

    def said(*sentences):
        return [("FAIL" if failing and s.startswith(failing) else "PASS", s) for s in sentences]

    two = {"ranks": 2}
    speed = row("training", "tokens_per_second", rate, **SIZED)
    slow = row("training", "tokens_per_second", 100.0, **SIZED | {"batch": 16, "layers": 5})
    peaks = [row("training_step", "peak_memory", 1024 * g, **SIZED) for g in (1.0, gib)]
    runs = {
        "00": ("00_correctness", said(*RIGHT), [], {}),
        "01": ("01_memory_scaling", [], peaks, {}),
        "02": ("02_backend_comparison", said(*COMPARED), [], {}),
        "04": ("04_throughput", said(*TRAINED), [speed, slow], {}),
        "05": ("05_distributed_tracing", said(*TRACED), _traced("nccl"), {"parameters": two}),
        "gloo": ("05_distributed_tracing", [("PASS", s) for s in TRACED], _traced(None, "cpu"),
                 {"parameters": two, "gpu": "cpu", "torch": "2.13.0", "started": "2026-10-01"}),
        "07": ("07_selfcheck", said(*JUDGED), [], {}),
    }  # fmt: skip
    for name, (notebook, claims, rows, more) in runs.items():
        if name != missing:
            store_run(root, notebook, claims, rows, **more)
    return open_stored(root)


def _traced(communication, device="cuda"):
    return [row("distributed_step", "loss", 5.0, communication=communication, device=device)]


def test_a_sound_system_is_asked_everything_and_nothing_is_found(tmp_path):
    found = decision.decide(today(tmp_path), "today")
    five = ["static", "branch", "missing", "gloo", "version"]
    assert [node for node, _ in found.path] == ["ended", "differ", "correct", *five]
    assert found.leaves == ("PASS", "SOUND")
    assert found.conclusion == "PASS: it ends by itself; PASS: none of the five has a part in it"
    assert decision.verdict(decision.go(today(tmp_path), "today")) == "GO"


@pytest.mark.parametrize(
    ("failing", "leaf"),
    [
        ("each branch alone", "INVALID"),
        ("the 2 attentions", "INVALID"),
        ("no query", "WRONG"),
        ("the rule turns down", "WRONG"),
        ("a static graph", "STATIC"),
        ("slc alone", "BRANCH"),
        ("ddp: ", "MISSING"),
    ],
)
def test_a_refuted_sentence_ends_in_the_leaf_of_its_question(tmp_path, failing, leaf):
    found = decision.decide(today(tmp_path, failing), "today")
    assert found.leaves == ("PASS", leaf)
    assert any(a.because.startswith(failing) for _, a in found.path)


def of_five(question, root):
    return decision.TREE[question].answer(open_stored(root), "today")


def test_what_comes_out_otherwise_under_gloo_is_found(tmp_path):
    transport = TRACED[-1].replace("on all", "on some of all")
    today(tmp_path)
    newer = {"parameters": {"ranks": 2}, "started": "2026-11-02", "gpu": "cpu"}
    store_run(tmp_path, "05_distributed_tracing", [("FAIL", transport)], _traced("gloo"), **newer)
    answer = of_five("gloo", tmp_path)
    assert answer.holds and answer.because.endswith("otherwise under gloo, nccl; ddp")


def test_a_sentence_that_comes_out_otherwise_under_another_torch_is_found(tmp_path):
    ask, other = partial(of_five, "version"), {"torch": "2.12.0"}
    store_run(tmp_path, "00_correctness", [("PASS", s) for s in RIGHT])
    assert ask(tmp_path).holds is None
    store_run(tmp_path, "00_correctness", [("PASS", "something else")], **other)
    assert ask(tmp_path).holds is None  # no sentence of both
    store_run(tmp_path, "00_correctness", [("PASS", RIGHT[0])], started="2026-11-03", **other)
    assert ask(tmp_path).holds is False
    store_run(tmp_path, "00_correctness", [("FAIL", RIGHT[0])], started="2026-11-04", **other)
    found = ask(tmp_path)
    assert found.holds and found.because.startswith("1 of 1") and len(found.where) == 2


@pytest.mark.parametrize(("outcome", "apart"), [({}, False), ({"outcome": "HANG"}, True)])
@pytest.mark.parametrize("factor", ["communication", "python"])
def test_an_ab_run_of_that_factor_answers_first(tmp_path, factor, outcome, apart):
    if factor == "communication":  # which on a CPU are one and the same
        rows = [row("training_step", "step_time", 1.0, communication=v) for v in ("auto", "gloo")]
        store_run(tmp_path, "08_ab", rows=rows)
        assert of_five("gloo", tmp_path).holds is None
    rows = [row("training_step", "step_time", 1.0, **{factor: "gloo"}),
            row("training_step", "step_time", 1.0, **{factor: "nccl"}, **outcome)]  # fmt: skip
    store_run(tmp_path, "08_ab", rows=rows, started="2026-11-02")
    question = "gloo" if factor == "communication" else "version"
    assert of_five(question, tmp_path).holds is apart


@pytest.mark.parametrize(
    ("missing", "node"),
    [("02", "differ"), ("00", "correct"), ("gloo", "gloo"), ("04", "ended"), ("05", "static")],
)
def test_a_question_without_evidence_names_the_command_that_would_bring_it(tmp_path, missing, node):
    found = decision.decide(today(tmp_path, missing=missing), "today")
    assert found.missing == found.path[-1][0] and found.path[-1][1].holds is None
    if missing != "05":
        assert found.missing == node
    assert decision.TREE[found.missing].wants in found.conclusion


def test_every_command_that_is_named_names_files_that_are_there():
    asked = [*decision.TREE.values(), *decision.GO]
    wants = {question.provided_by(subject) for question in asked for subject in decision.SUBJECTS}
    for number, file in re.findall(r"nsa run (\d\d)(?: -f (\S+?))?(?=[;, ]|$)", "; ".join(wants)):
        assert list(NOTEBOOKS.glob(f"{number}_*.ipynb")), number
        assert not file or (ROOT / file).is_file(), file


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "GO"),
        ({"gib": 59.9}, "GO"),
        ({"gib": 64.9}, "GO"),
        ({"gib": 65.0}, "NO-GO"),
        ({"rate": 300.0}, "GO"),
        ({"rate": 299.0}, "NO-GO"),
        ({"failing": "8 backends hold"}, "NO-GO"),
        ({"failing": "each of 10"}, "NO-GO"),
        ({"failing": "healthy ones"}, "NO-GO"),
        ({"missing": "07"}, "UNDECIDED"),
        ({"missing": "01"}, "UNDECIDED"),
        ({"missing": "04"}, "UNDECIDED"),
    ],
)
def test_go_turns_at_its_thresholds_and_wants_all_its_evidence(tmp_path, changes, verdict):
    rules = decision.go(today(tmp_path, **changes), "today")
    assert decision.verdict(rules) == verdict, [str(rule) for rule in rules]
    told = str(rules[1])
    assert ("above the alert of 60" in told) == (changes.get("gib", 0) >= 60)


@pytest.mark.parametrize(
    ("rows", "holds"),
    [
        ([row("step", "latency", 4_625.0, 1024, "loop", layers=1, design="smoke")], False),
        ([row("step", "latency", 2_000.0, 1024, "loop", layers=1, design="smoke")], None),
        ([row("step", "latency", 100.0, 128, "loop", layers=1, design="tiny")], None),
        ([row("step", "recorded_latency", 5_000.0, 2048, "loop", layers=12, design="production")],
         True),
        ([row("step", "recorded_latency", 9e4, 2048, "loop", layers=12, design="production")],
         False),
    ],
)  # fmt: skip
def test_the_loops_speed_is_bounded_by_fewer_layers_and_held_only_at_full_size(
    tmp_path, rows, holds
):
    store_run(tmp_path, "03_step5_hang_bisection", rows=rows)
    assert answers.loop_speed(open_stored(tmp_path)).holds is holds


def test_a_cpus_times_and_memory_decide_nothing(tmp_path):
    rows = [row("step", "latency", 9e9, 1024, "loop", layers=1, design="smoke"),
            row("training_step", "peak_memory", 9e9, **SIZED)]  # fmt: skip
    for notebook in ("01_memory_scaling", "03_step5_hang_bisection"):
        store_run(tmp_path, notebook, rows=rows, gpu="cpu")
    stored = open_stored(tmp_path)
    assert answers.loop_speed(stored).holds is answers.peak(stored, *PEAKS).holds is None


@pytest.mark.parametrize("subject", decision.SUBJECTS)
def test_committed_evidence_gives_the_same_answer_twice_and_all_of_it_opens(subject):
    first, second = (decision.evidence() for _ in range(2))
    found = decision.decide(first, subject)
    assert found == decision.decide(second, subject)
    assert decision.go(first, subject) == decision.go(second, subject)
    answered = [a for _, a in found.path] + [rule.answer for rule in decision.go(first, subject)]
    for answer in answered:
        assert (answer.holds is None) == (not answer.where)
        for where in answer.where:
            name, _, line = where.partition("#L")
            path = decision.RUNS / name
            assert path.exists(), where
            assert not line or path.read_text().splitlines()[int(line) - 1] == "  {", where


def test_a_backend_that_ran_out_of_memory_is_no_go(tmp_path):
    burst = row("training_step", "peak_memory", None, backend="masked", outcome="oom", **SIZED)
    late = row("training_step", "peak_memory", None, backend="flex", outcome="timeout", **SIZED)
    fits = row("training_step", "peak_memory", 9.0, **SIZED)
    store_run(tmp_path, "01_memory_scaling", rows=[fits, late])
    assert answers.peak(open_stored(tmp_path), *PEAKS).holds
    store_run(tmp_path, "01_memory_scaling", rows=[fits, burst], started="2026-11-02")
    found = answers.peak(open_stored(tmp_path), *PEAKS)
    assert found.holds is False and "masked ran out of memory" in found.because


def test_nothing_is_decided_without_runs(tmp_path):
    for subject in decision.SUBJECTS:
        assert decision.decide(Stored([]), subject).missing == "ended"
        assert decision.verdict(decision.go(Stored([]), subject)) == "UNDECIDED"


def test_the_command_prints_both_and_exits_by_todays_system(tmp_path, capsys):
    today(tmp_path)
    words = ["explain", "--decide", "--runs", str(tmp_path)]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert (
        "Today's system: GO" in printed and "The case study's loop, rebuilt: UNDECIDED" in printed
    )
    for path in re.findall(rf"{tmp_path}/\S+?(?=#|\n)", printed):
        assert Path(path).exists()
    today(tmp_path / "worse", "no query")
    assert cli.main(["explain", "--decide", "--runs", str(tmp_path / "worse")]) == 1
    assert "Today's system: NO-GO" in capsys.readouterr().out
