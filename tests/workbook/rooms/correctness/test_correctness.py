"""Contents of the correctness notebook: the definition, the oracle, the gallery, its sentences."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from nsa.attention import registry
from whyhung.process.trial import Outcome
from workbook.lab import sweep
from workbook.lab.measure.shapes import TINY_CONFIG, Shape
from workbook.rooms.correctness import claims, gallery, oracle, plots, probe, table
from workbook.rooms.correctness.definition import definition, facts
from workbook.rooms.correctness.gallery import RIGHT, Seen, check_names
from workbook.rooms.correctness.mutants import MUTANTS, ROOT, mutant
from workbook.runs.store import Run


@pytest.fixture(scope="module")
def drawn():
    return definition()


def broken(found):
    return [sentence for sentence, holds in facts(found) if not holds]


def test_every_fact_of_the_definition_holds_at_other_sizes_too(drawn):
    for found in (drawn, definition(40, seed=3), definition(37, window=1, select_count=4)):
        assert broken(found) == []


@pytest.mark.parametrize(
    ("branch", "sentence"),
    [("win", "a window holds"), ("slc", "no query of any branch sees a later token")],
)
def test_a_picture_that_is_wrong_breaks_its_fact(drawn, branch, sentence):
    wrong = {name: mask.clone() for name, mask in drawn.sees.items()}
    wrong[branch][0, 5] = True
    assert any(s.startswith(sentence) for s in broken(replace(drawn, sees=wrong)))


def test_a_choice_that_is_not_the_best_breaks_its_fact(drawn):
    blocks = drawn.blocks.clone()
    best = blocks[0, 60].tolist()
    blocks[0, 60] = torch.tensor([0, next(j for j in range(1, 7) if j not in best), 7])
    found = broken(replace(drawn, blocks=blocks))
    assert found == ["the free choices are the most important legal blocks"]


def test_every_mutant_is_shown_where_a_backend_runs_it():
    for view, backend in (one.shows for one in MUTANTS.values()):
        assert view in probe.VIEWS
        assert backend in ("reference", *registry.names())


@pytest.mark.full
def test_every_killer_is_a_test_by_its_whole_name():
    """pytest -k takes a part of a name for the whole."""
    assert claims.killers_exist().verdict == "PASS"


def test_unknown_mutants_are_refused_with_the_nearest():
    assert check_names(["all"]) == tuple(MUTANTS)
    assert check_names([]) == ()
    twice = ["window-leak", "inverted-mask", "window-leak"]
    assert check_names(twice) == ("window-leak", "inverted-mask")
    with pytest.raises(ValueError, match=r"'window-of-by-one'.*the nearest is 'window-off-by-one'"):
        gallery.look_at(["window-of-by-one"])
    with pytest.raises(ValueError, match="unknown"):
        mutant("x")


def test_a_probe_tells_the_weights_that_the_reference_gives():
    picture = np.array(probe.look({"view": "window", "backend": "masked"})["picture"])
    assert np.allclose(picture.sum(1), 1, atol=1e-3)
    assert ((picture > 0).sum(1) == np.minimum(np.arange(64) + 1, 12)).all()
    compressed = probe.look({"view": "compressed", "backend": "gather"})["picture"]
    assert np.array(compressed)[:7].sum() == 0


@pytest.mark.processes
@pytest.mark.full
def test_copies_are_looked_at_in_forks_and_the_code_here_stays_as_it_is(tmp_path):
    names = ["window-leak", "current-block-dropped"]
    seen = gallery.look_at(names, workers=1, folder=tmp_path)
    assert [one.mutant for one in seen] == [RIGHT, RIGHT, *names]
    leak = table.difference(seen[2], seen)
    assert np.triu(leak, 1).max() > 0.1  # tokens of the future
    assert list(table.gallery(seen)["sees the future"]) == ["yes", "no"]
    assert claims.mutants_are_seen(seen).verdict == "PASS"
    again = probe.look({"view": "window", "backend": "sequential"})["picture"]
    assert again == next(s.picture for s in seen if (s.mutant, s.view) == (RIGHT, "window"))


@pytest.mark.full
@pytest.mark.parametrize(("device", "shares"), [("cpu", 2), ("cuda", 6)])
def test_on_a_gpu_each_kernel_is_looked_at_there_in_a_process_of_its_own(
    device, shares, monkeypatch, tmp_path
):
    asked, folders = [], set()

    def child(entry, spec, *, env, folder, **_):
        folders.add(folder)
        asked.append([(call["spec"]["backend"], call["spec"]["device"]) for call in spec["calls"]])
        assert ("TRITON_INTERPRET" in env) == (device == "cpu")
        found = [{"result": {"picture": [[0.0]]}} for _ in spec["calls"]]
        return Outcome("ok", {"found": found}, 0.1, "", 0)

    monkeypatch.setattr(gallery, "run_child", child)
    names = ["kernel-window-off-by-one", "kernel-base-not-gated", "window-off-by-one"]
    seen = gallery.look_at(names, device=device, workers=2, folder=tmp_path)
    assert [one.mutant for one in seen] == [RIGHT, RIGHT, RIGHT, *names]
    assert len(asked) == len(folders) == shares and sum(map(len, asked)) == 6
    for calls in asked:
        assert all(where == (device if name == "triton" else "cpu") for name, where in calls)
        assert len(calls) == 1 or device == "cpu"


@pytest.mark.processes
def test_a_fork_that_fails_or_dies_says_so(tmp_path):
    for name in ("nsa", "workbook"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    call = {"root": str(tmp_path), "entry": "workbook.rooms.correctness.probe:look"}
    failed = probe._forked(call | {"spec": {"view": "window", "backend": "none"}})
    assert "'none' is unknown" in failed["error"]
    died = probe._forked({"root": str(tmp_path), "entry": "os:abort", "spec": {}})
    assert "error" in died


SHAPE = Shape(33, 4, 2, 16, 16, dtype="fp32", shared_kv=False, config=TINY_CONFIG).to_dict()


@pytest.fixture(scope="module")
def held():
    return oracle.measure([SHAPE])


@pytest.mark.full
def test_the_oracle_holds_every_backend_and_turns_impostors_down(held):
    claim = claims.backends_are_held(held)
    assert claim.verdict == "PASS"
    for name in ("triton", "gather", "masked", "sequential"):
        assert name in claim.claim
    assert claims.impostors_are_turned_down(held).verdict == "PASS"
    shown = table.oracle(held)
    assert shown.loc[("gather", "fp32"), "tensors held"] == 9  # o, q, three k and v, gates
    assert "GPU" in shown.loc[("flash", "fp32"), "why not"]
    assert len(table.impostors(held)) == len(oracle.IMPOSTORS)


@pytest.mark.full
def test_a_backend_that_is_red_or_an_impostor_that_passes_is_a_failure(held):
    wrong = {"outcome": "red", "message": "o: wrong"}
    red = [row | wrong if row["who"] == "gather" else row for row in held]
    assert claims.backends_are_held(red).verdict == "FAIL"
    passed = [row | {"outcome": "held"} if row["who"] == "x 1.01" else row for row in held]
    claim = claims.impostors_are_turned_down(passed)
    assert (claim.verdict, claim.evidence["passed"]) == ("FAIL", ["x 1.01, fp32"])
    assert claims.backends_are_held([]).verdict == "INCONCLUSIVE"


def test_children_that_share_an_oracle_find_the_same_in_the_same_order(monkeypatch):
    def child(entry, spec, **_):
        rows = [
            {"shape": str(Shape.from_dict(one)), "dtype": one["dtype"], "who": who}
            for one in spec["shapes"]
            for who in ("gather", "triton")
        ]
        return Outcome("ok", {"rows": rows}, 1.0, "", 0)

    monkeypatch.setattr(sweep, "run_child", child)
    shapes = [
        SHAPE | {"tokens": t, "dtype": dtype} for dtype in ("fp32", "bf16") for t in (1, 33, 20)
    ]
    alone = oracle.measure(shapes)
    assert {row["dtype"] for row in alone[:6]} == {"fp32"}
    assert [row["who"] for row in alone] == ["gather", "triton"] * 6
    for workers in (2, 4, 9):
        assert oracle.measure(shapes, workers=workers) == alone


@pytest.mark.processes
def test_an_oracle_that_does_not_end_is_no_oracle():
    with pytest.raises(RuntimeError, match="unknown"):
        oracle.measure([SHAPE | {"dtype": "fp8"}])


def seen_of(name, view, picture, message=""):
    return Seen(name, view, "gather", picture, message)


RIGHTLY = seen_of(RIGHT, "window", [[1.0, 0.0], [0.5, 0.5]])
WRONGLY = seen_of("window-leak", "window", [[0.0, 1.0], [0.5, 0.5]])


def test_a_mutant_without_a_difference_fails_and_one_without_a_picture_is_open():
    claim = claims.mutants_are_seen
    assert claim([RIGHTLY, WRONGLY]).verdict == "PASS"
    assert claim([RIGHTLY, replace(WRONGLY, picture=RIGHTLY.picture)]).verdict == "FAIL"
    lost = replace(WRONGLY, picture=None, message="timeout")
    assert claim([RIGHTLY, lost]).verdict == "INCONCLUSIVE"
    assert table.gallery([RIGHTLY, lost])["rows that are wrong"].item() == "timeout"


LESSON = {"lesson": "window", "backend": "masked", "tokens": 64, "outcome": "ok", "message": "",
          "accuracy": {"inside": 1.0}, "expected": {"inside": True}, "steps": 50, "seconds": 1.0,
          "curve": [{"step": 25, "loss": 1.0}, {"step": 50, "loss": 0.5}]}  # fmt: skip


def taught(name, **changes):
    row = LESSON | {"mutant": name, "loss": 0.5, "as_expected": name == RIGHT, "peek": 0.0}
    return row | changes


LEARNT, MISLED = taught(RIGHT), taught("window-leak")


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([LEARNT, MISLED], "PASS"),
        ([LEARNT, MISLED | {"as_expected": True}], "FAIL"),
        ([LEARNT | {"as_expected": False}, MISLED], "FAIL"),
        ([LEARNT, MISLED | {"outcome": "timeout"}], "INCONCLUSIVE"),
        ([], "INCONCLUSIVE"),
    ],
)
def test_lessons_tell_only_when_right_attention_learns_and_the_mutant_does_not(rows, verdict):
    assert claims.lessons_tell(rows).verdict == verdict


def test_a_loss_that_is_as_low_and_wrong_still_is_named():
    rows = [LEARNT, MISLED | {"peek": 1.0}, taught("heads-as-time", loss=2.0)]
    claim = claims.losses_do_not_tell(rows)
    assert (claim.verdict, claim.evidence) == ("PASS", {"window-leak": "peeks"})


def test_killers_that_survive_fail_and_those_not_run_are_open():
    ends = {"killed": "PASS", "survived": "FAIL", "no tests": "INCONCLUSIVE"}
    for outcome, verdict in ends.items():
        assert claims.killers_kill([{"mutant": "a", "outcome": outcome}]).verdict == verdict
    assert claims.killers_kill([]).verdict == "INCONCLUSIVE"


@pytest.mark.processes
def test_lessons_are_read_back_from_a_kept_run(tmp_path):
    untold = {"mutant": "x", "outcome": "untold", "message": "why", "seconds": 0.0}
    folder = tmp_path / "2026-01-01" / "00_correctness-1"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text('{"run_id": "00_correctness-1"}')
    run = Run(folder)
    run.device("cpu")
    run.add_rows(table.to_metrics([], [LEARNT, MISLED, untold]))
    kept = table.kept_lessons("00_correctness-1", tmp_path)
    assert [row["mutant"] for row in kept] == [RIGHT, "window-leak", "x"]
    assert kept[0]["accuracy"] == {"inside": 1.0}
    assert list(table.lessons(kept)["as right attention"]) == ["yes", "no", "untold"]
    (folder / "metrics.csv").unlink()
    with pytest.raises(ValueError, match="holds no lessons"):
        table.kept_lessons("00_correctness-1", tmp_path)


@pytest.mark.full
def test_figures_are_drawn_of_what_there_is(drawn):
    import matplotlib.pyplot as plt

    lost = seen_of("inverted-mask", "selected", None, "timeout")
    drawings = [
        plots.what_is_seen(drawn),
        plots.importance_of(drawn, 50),
        plots.gates_of(drawn),
        plots.gallery([RIGHTLY, WRONGLY, lost]),
        plots.curves([LEARNT, MISLED]),
        plots.curves([]),
    ]
    for figure in drawings:
        figure.canvas.draw()
        plt.close(figure)
    with pytest.raises(ValueError, match="64 queries"):
        plots.importance_of(drawn, 64)
    shown = table.killers([RIGHTLY, WRONGLY], [])
    assert shown["run here"].to_dict() == {"window-leak": "not in this run"}
