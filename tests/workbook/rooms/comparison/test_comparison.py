"""The comparison notebook's sentences, tables and figures, on cells made to deserve them."""

import itertools
from dataclasses import replace

import matplotlib
import pytest

from nsa.config import NSAConfig
from workbook.lab.measure.shapes import TINY_CONFIG, Shape
from workbook.rooms.comparison import claims, plots, record, table, trials
from workbook.rooms.comparison.cell import NOT_COMPARED
from workbook.rooms.comparison.claims import AIMS
from workbook.runs import looks, metrics

matplotlib.use("agg")
MAIN = Shape(8192)
TOKENS = (2048, 4096, 8192, 16384, 65536)
LENGTHS = [replace(MAIN, tokens=t) for t in TOKENS]
LONG = LENGTHS[-1]


def cell(name, shape=MAIN, forward=2.0, backward=None, *, operation="nsa_attention", **changes):
    """A cell as the benchmark leaves it; forward None: it failed."""
    backward = forward if backward is None else backward
    modes = {} if forward is None else {"forward": forward, "backward": backward}
    return {
        "shape": shape.to_dict(),
        "name": name,
        "operation": operation,
        "outcome": "ok" if modes else "oom",
        "message": "" if modes else "OutOfMemoryError",
        "checked": "T=64: all rows",
        "errors": {mode: [0.001, 0.004] for mode in modes},
        "latency_ms": {mode: [ms, 0.9 * ms, 1.1 * ms] for mode, ms in modes.items()},
        "memory_mib": dict.fromkeys(modes, shape.tokens / 100),
        "paths": {"slc": [name]} if modes else {},
        "limit_ms": {"forward": shape.tokens / 1e4, "backward": shape.tokens / 5e3, "step": 1.0},
        "union": {"4": 20.0, "8": 30.0},
        "ceilings": {"matmul_tflops": 790.0, "copy_tb_s": 4.2},
        "timing": "absolute",
    } | changes


def dense(shape=MAIN, ms=2.0, name="dense-fa4"):
    return cell(name, shape, ms, operation="dense_attention")


def frame(*cells, gpu="NVIDIA H200"):
    return metrics.table([metrics.row(row, {"device": gpu}) for row in record.rows(cells)])


def over_tokens(name="triton", per_token=1e-4, **changes):
    return [cell(name, shape, per_token * shape.tokens, **changes) for shape in LENGTHS]


OTHER = cell("fla", forward=0.5, checked=NOT_COMPARED)


def test_a_break_even_point_is_interpolated_between_two_lengths():
    assert table.crossing([1024, 4096], [2.0, 8.0], [1.0, 16.0]) == "2048"
    assert table.crossing([64, 128], [1.0, 2.0], [2.0, 3.0]) == "below 64"
    assert table.crossing([64, 128], [3.0, 3.0], [2.0, 3.0]) == "beyond 128"
    # Losing again later counts: the last crossing is the one from which it stays ahead.
    assert table.crossing([64, 128, 256], [1.0, 3.0, 3.0], [2.0, 2.0, 4.0]) != "below 64"


def test_break_even_is_against_the_fastest_dense_of_each_length():
    cells = []
    for t, fast, slow in ((2048, 1.0, 1.5), (8192, 16.0, 30.0)):
        shape = replace(MAIN, tokens=t)
        cells += [dense(shape, fast), dense(shape, slow, "dense-flash")]
        cells.append(cell("triton", shape, t / 1024))
    found = table.break_even(frame(*cells))
    assert found.iloc[0]["forward"] == found.iloc[0]["backward"] == "4096"


def test_the_fastest_are_named_with_their_share_of_the_limit():
    df = frame(cell("gather", forward=4.0), cell("triton", forward=2.0), dense(ms=3.0), OTHER)
    line = table.fastest(df).xs("forward", level="mode").iloc[0]
    assert (line["NSA"], line["dense"]) == ("triton", "dense-fa4")
    assert line["dense / NSA"] == pytest.approx(1.5)
    assert line["NSA of limit"] == pytest.approx(0.8192 / 2.0)
    # What computes another function neither wins nor has a share of the limit.
    shares = df[df["metric"] == "fraction_of_limit"]
    assert set(shares["backend"]) == {"gather", "triton", "dense-fa4"}


def test_tables_show_values_and_failures_by_name_and_the_reasons_beside():
    df = frame(cell("triton"), cell("masked", forward=None))
    shown = table.shown(df, "latency", "forward")
    column = shown[8192].droplevel(table.CURVE)
    assert (column["triton"], column["masked"], column["limit"]) == ("2", "oom", "0.819")
    forward_only = cell("flex", latency_ms={"forward": [1.0, 1.0, 1.0]})
    backward = table.shown(frame(forward_only), "latency", "backward")[8192]
    assert backward.droplevel(table.CURVE)["flex"] == "none"
    notes = table.notes(df)
    assert notes.loc["masked", "why"] == "OutOfMemoryError" and notes.loc["masked", "T"] == "8192"
    assert table.accuracy(df).loc["triton", "forward"] == 0.25
    assert table.unions(df).iloc[:, 0].tolist() == [20.0, 30.0]
    told = table.facts([cell("triton"), cell("triton", forward=None)], [])
    assert told == ["triton: ok x1, oom x1", "triton: slc triton"]


def test_a_name_that_holds_the_word_limit_is_not_the_limit():
    df = frame(cell("peer my_limit:f"))
    assert "peer my_limit:f" in set(df[df["metric"] == "fraction_of_limit"]["backend"])


def test_shapes_that_differ_in_the_papers_numbers_are_different_curves():
    other = replace(MAIN, config=NSAConfig(window=256))
    own = replace(MAIN, shared_kv=False)
    df = frame(cell("triton", forward=2.0), cell("triton", other, 3.0), cell("triton", own, 4.0))
    shown = table.wide(df, "latency", "forward").xs("triton", level="backend")
    assert sorted(shown[8192]) == [2.0, 3.0, 4.0]
    names = shown.index.get_level_values("shape")
    assert names[0] == "HQ 64, HKV 4, D 128, bf16" and names[1].endswith(", w 256")
    assert names[2].endswith(", own k, v a branch")


@pytest.mark.parametrize(("gpu", "said"), [("cpu", True), ("NVIDIA H200", False)])
def test_tables_of_a_cpus_times_say_that_they_mean_nothing(gpu, said):
    df = frame(cell("triton"), dense(), gpu=gpu)
    for made in (table.shown(df, "latency", "forward"), table.fastest(df), table.break_even(df)):
        assert ("times not meaningful" in made.to_string()) == said


def test_accuracy_names_who_is_red_elsewhere():
    wrong = cell("gather", replace(MAIN, tokens=16384), None, outcome="red", message="dk: worst")
    found = table.accuracy(frame(cell("gather"), cell("triton"), wrong))
    assert found.loc["gather", "checked"].startswith("RED at another shape")
    assert found.loc["triton", "checked"] == "T=64: all rows"


BROKEN = cell("gather", forward=None, outcome="error", message="KeyError")
LOST = BROKEN | {"outcome": "not run", "message": f"{trials.PROCESS}: timeout"}
PACKED = cell("packed", memory_mib={"forward": 10.0, "backward": 30.0})
FAST = cell("triton", forward=0.5)
SAME = cell("gather", paths={"slc": ["triton"]})


@pytest.mark.parametrize(
    ("claim", "verdict", "given"),
    [
        ("everything_is_accurate", "PASS", [cell("triton")]),
        ("everything_is_accurate", "INCONCLUSIVE", []),
        # a backend whose process was lost did not run
        ("nothing_broke", "INCONCLUSIVE", [LOST]),
        ("nothing_broke", "INCONCLUSIVE", [cell("triton"), LOST]),
        ("nothing_broke", "INCONCLUSIVE", [cell("gather"), LOST]),
        ("nothing_broke", "FAIL", [cell("gather"), LOST | {"message": trials.CRASHED}]),
        # one that breaks off refutes; a peer, or too little memory, does not
        ("nothing_broke", "FAIL", [cell("triton"), BROKEN]),
        ("nothing_broke", "PASS", [cell("triton"), BROKEN | {"name": "dense-cudnn"}]),
        ("nothing_broke", "PASS", [cell("triton"), BROKEN | {"outcome": "oom"}]),
        ("backends_are_different_programs", "PASS", [cell("triton"), cell("masked")]),
        ("backends_are_different_programs", "FAIL", [cell("triton"), SAME]),
        ("backends_are_different_programs", "NOT APPLICABLE", [cell("triton")]),
        ("memory_is_not_identical", "FAIL", frame(PACKED, PACKED | {"name": "masked"})),
        ("memory_is_not_identical", "NOT APPLICABLE", frame(PACKED)),
        ("memory_is_not_identical", "INCONCLUSIVE", frame(PACKED, cell("masked", forward=None))),
        ("memory_is_not_identical", "INCONCLUSIVE", frame()),
        ("nothing_beats_the_limit", "PASS", frame(cell("triton"))),
        ("nothing_beats_the_limit", "FAIL", frame(FAST)),
        ("nothing_beats_the_limit", "PASS", frame(OTHER, cell("triton"))),
        ("nothing_beats_the_limit", "NOT APPLICABLE", frame(FAST, gpu="cpu")),
    ],
)
def test_rows_decide(claim, verdict, given):
    assert getattr(claims, claim)(given).verdict == verdict


def test_a_verdict_names_who_is_wrong_and_by_how_much_memory_differs():
    wrong = cell("gather", forward=None, outcome="red", message="dk: worst error")
    told = claims.everything_is_accurate([cell("triton"), wrong])
    assert told.verdict == "FAIL" and "gather T=8192" in told.claim
    gather = cell("gather", memory_mib={"forward": 10.0, "backward": 90.0})
    told = claims.memory_is_not_identical(frame(PACKED, gather))
    assert told.verdict == "PASS" and "20,451.9 MB" in told.claim and "factor of 3.0" in told.claim


@pytest.mark.parametrize(
    ("times", "gpu", "verdict"),
    [
        ((2.1, 4.7), "NVIDIA H200", "PASS"),
        ((2.3, 4.7), "NVIDIA H200", "AIM MISSED"),
        ((2.1, 4.9), "NVIDIA H200", "AIM MISSED"),
        ((2.1, 4.7), "NVIDIA H100", "NOT APPLICABLE"),
        ((2.1, 4.7), "cpu", "NOT APPLICABLE"),
        ((None, None), "NVIDIA H200", "INCONCLUSIVE"),
    ],
)
def test_an_aim_is_decided_by_both_directions_on_an_h200_only(times, gpu, verdict):
    claim = claims.reaches(frame(cell("triton", MAIN, *times), gpu=gpu), AIMS[0], "triton")
    assert claim.verdict == verdict and "aim 2.2 / 4.8" in claim.claim
    assert "2.65 / 5.93" in claim.claim


def test_an_aim_is_of_its_own_shape_and_queries():
    changes = [{"queries": "correlated"}, {"kv_heads": 16}, {"dtype": "fp16"}]
    changes.append({"config": TINY_CONFIG})
    df = frame(*(cell("triton", replace(MAIN, **change), 1.0) for change in changes))
    assert claims.reaches(df, AIMS[0], "triton").verdict == "NOT APPLICABLE"
    assert claims.reaches(df, AIMS[1], "triton").verdict == "PASS"


def test_a_short_shapes_aim_is_decided_by_its_cuda_graph():
    aim = next(aim for aim in AIMS if aim.tokens == 2048)
    shape = replace(MAIN, tokens=2048, heads=12, dim=64, value_dim=64)
    ms = {"forward": 1.3, "backward": 2.5, "graph_forward": 0.12, "graph_backward": 0.28}
    times = {mode: [x, 0.9 * x, 1.1 * x] for mode, x in ms.items()}
    claim = claims.reaches(frame(cell("triton", shape, latency_ms=times)), aim, "triton")
    assert claim.verdict == "PASS"
    assert "0.12 / 0.28 ms in a CUDA graph, 1.3 / 2.5 without" in claim.claim


def test_memory_is_held_to_its_exponent_and_its_size():
    linear = frame(*over_tokens())
    assert claims.memory_is_linear(linear, "triton").verdict == "PASS"
    assert claims.memory_stays_small(linear, "triton").verdict == "PASS"
    steep = over_tokens()
    for one in steep:
        one["memory_mib"] = dict.fromkeys(one["memory_mib"], 1e-06 * one["shape"]["tokens"] ** 2)
    assert claims.memory_is_linear(frame(*steep), "triton").verdict == "AIM MISSED"
    assert claims.memory_stays_small(frame(*steep), "triton").verdict == "AIM MISSED"
    assert claims.memory_is_linear(frame(cell("triton")), "triton").verdict == "NOT APPLICABLE"
    another = frame(cell("triton", replace(LONG, batch=2)))  # decides nothing for the main shape
    assert claims.memory_stays_small(another, "triton").verdict == "NOT APPLICABLE"


def test_dense_is_beaten_only_when_at_every_length_from_8k_on():
    cells = [c for shape in LENGTHS for c in (cell("triton", shape, 1.0), dense(shape, 2.0))]

    def told(*more):
        return claims.beats_dense_from(frame(*cells, *more), 8192, "triton")

    assert told().verdict == told(dense(LENGTHS[0], 0.5)).verdict == "PASS"
    lost = told(dense(LONG, 0.9, "dense-flash"))
    assert lost.verdict == "AIM MISSED" and "0.90 times" in lost.claim
    assert "every dense (dense-fa4, dense-flash) attention" in lost.claim
    # A point that only dense could do leaves the claim open.
    cells[-2:] = [cell("triton", LONG, None, outcome="red", message="dk"), dense(LONG, 99.0)]
    assert told().verdict == "INCONCLUSIVE" and "not measured: " in told().claim
    # So does one that neither could do, and one that no row tells of.
    cells[-2:] = [
        c | {"outcome": "not run"} for c in (cell("triton", LONG, None), dense(LONG, None))
    ]
    assert told().verdict == "INCONCLUSIVE" and f"{LONG.tokens}, backward, triton" in told().claim
    del cells[-1]
    assert told().verdict == "INCONCLUSIVE" and f"{LONG.tokens}, backward, dense" in str(
        told().evidence
    )
    # One that ran out of memory has answered.
    cells[-1:] = [cell("triton", LONG, 1.0), dense(LONG, None) | {"outcome": "oom"}]
    assert told().verdict == "PASS"


def test_every_claim_and_aim_is_decided_in_one_go():
    cells = [*over_tokens(), *over_tokens("packed", 2e-4), *map(dense, LENGTHS)]
    df = frame(*cells)
    told = claims.all_claims(df, cells) + claims.aims(df)
    assert len(told) == 5 + len(AIMS) + 3
    assert "INCONCLUSIVE" not in {c.verdict for c in told}


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def crosses(axes):
    return [list(line.get_xdata()) for line in axes.get_lines() if line.get_marker() == "x"]


def test_times_are_drawn_beside_dense_and_the_limits():
    cells = [*over_tokens(), *(dense(shape, 1e-8 * shape.tokens**2) for shape in LENGTHS)]
    forward, backward = plots.latency(frame(*cells), note="one GPU").axes
    titles = [axes.get_title(loc="left").partition(",")[0] for axes in (forward, backward)]
    assert titles == ["Forward", "Backward"]
    drawn = lines(forward)
    assert list(drawn["triton"].get_ydata()) == [1e-4 * t for t in TOKENS]
    assert drawn["triton"].get_linestyle() == "-" and drawn["dense-fa4"].get_linestyle() == ":"
    assert drawn["limit of NSA"].get_linestyle() == "--" and "limit of dense" in drawn
    assert drawn["triton"].get_color() == looks.look("triton")[0]
    assert forward.get_title(loc="right").strip() == "one GPU"


def test_each_kind_of_queries_and_each_shape_has_panels_of_its_own():
    shapes = [MAIN, replace(MAIN, queries="correlated"), replace(MAIN, kv_heads=16)]
    df = frame(*(cell("triton", shape) for shape in shapes))
    titles = [axes.get_title(loc="left") for axes in plots.memory(df).axes]
    assert len(titles) == 6 and sum("correlated" in t for t in titles) == 2
    assert sum("HKV 16" in t for t in titles) == 2
    assert len(plots.of_limit(df).axes) == 6


def test_the_headline_names_each_line_at_its_end_with_its_multiple_of_tritons_time():
    cells = [*over_tokens(), *over_tokens("packed", 3e-4)]
    for one in cells:
        one["latency_ms"]["step"] = one["latency_ms"]["forward"]
    (axes,) = plots.headline(frame(*cells)).axes
    said = [text.get_text() for text in axes.texts]
    assert "triton" in said and "packed: 3 x" in said
    heights = sorted(text.xyann[1] + looks._height(axes, text.xy[1]) for text in axes.texts)
    assert all(b - a >= 8.5 for a, b in itertools.pairwise(heights)), "no name on another"
    with pytest.raises(ValueError, match="on random queries"):
        plots.headline(frame(*over_tokens()))  # no step was timed


def test_shares_of_the_limit_begin_at_0_unless_one_would_be_lost_there():
    cells = [*over_tokens(), *over_tokens("packed", 2e-4)]
    near = plots.of_limit(frame(*cells)).axes[0]
    shares = [y for line in near.get_lines() for y in line.get_ydata()]
    assert near.get_yscale() == "linear" and near.get_ylim()[0] == 0
    assert near.get_ylim()[1] > 1.04 * max(shares)
    far = plots.of_limit(frame(*cells, *over_tokens("sequential", 1.0))).axes[0]
    assert far.get_yscale() == "log"


def test_a_failed_point_is_a_cross_and_what_never_ran_is_not_drawn():
    cells = [cell("masked", s, 5.0 if s.tokens < 8192 else None) for s in LENGTHS]
    cells += [cell("flash", s, None, outcome="declined") for s in LENGTHS]
    forward = plots.latency(frame(*cells)).axes[0]
    assert crosses(forward) == [[8192, 16384, 65536]] and "flash" not in lines(forward)
    assert any(text.get_text() == "masked: oom" for text in forward.texts)


def test_a_shape_with_one_length_is_left_to_the_tables_where_others_have_more():
    single = cell("triton", replace(MAIN, kv_heads=16), 1.0)
    assert len(plots.latency(frame(single)).axes) == 2
    drawn = plots.latency(frame(*over_tokens(), single)).axes
    assert len(drawn) == 2 and "HKV 4" in drawn[0].get_title(loc="left")


def test_what_nothing_was_measured_of_has_no_panel_but_a_line(tmp_path):
    lost = cell("triton", replace(MAIN, kv_heads=16), None, outcome="not run")
    lost["limit_ms"] = dict.fromkeys(lost["limit_ms"], float("nan"))
    figure, alone = plots.latency(frame(cell("triton", MAIN), lost)), plots.latency(frame(lost))
    assert len(figure.axes) == 2 and "HKV 16" in figure.get_suptitle()
    assert "HKV 4" not in figure.get_suptitle()
    for axes in alone.axes:
        assert "nothing was measured" in {text.get_text() for text in axes.texts}
    for drawn in (figure, alone):
        drawn.savefig(tmp_path / "figure.png")


def test_a_run_without_a_time_has_its_figures_and_tables():
    lost = cell("triton", MAIN, None, outcome="not run", union={})
    df = frame(lost)
    assert set(df[df["metric"] == "latency"]["backend"]) == {"triton", "limit"}
    for axes in plots.of_limit(df).axes:
        assert "nothing was measured" in {text.get_text() for text in axes.texts}
    assert not len(table.unions(df))


def test_what_there_was_no_time_for_is_no_failure():
    late = cell("masked", LONG, None, outcome="not run")
    full = cell("masked", replace(MAIN, tokens=16384), None)
    half = cell("masked", replace(MAIN, tokens=4096))
    del half["latency_ms"]["backward"]
    panels = plots.latency(frame(cell("masked"), half, full, late)).axes
    for axes, drawn in zip(panels, ([4096, 8192], [8192]), strict=True):
        assert crosses(axes) == [[16384]]
        assert list(lines(axes)["masked"].get_xdata()) == drawn


def test_a_figure_without_rows_says_which_are_missing():
    with pytest.raises(ValueError, match="no rows whose metric is 'latency'"):
        plots.latency(frame())


@pytest.mark.processes
@pytest.mark.full
def test_a_shape_whose_process_crashes_leaves_rows_and_the_others(tmp_path):
    small = Shape(40, 2, 1, 16, 16, dtype="fp32", config=TINY_CONFIG)
    both, keep = [small, replace(small, tokens=64)], {"folder": tmp_path, "progress": False}
    chosen = {"backends": ["gather"], "with_dense": False, "threads": 1}
    entry = "bench_peers:measure_or_crash"
    cells = trials.compare(both, deadline_s=120, entry=entry, **chosen, **keep)
    outcomes = [(c["name"], c["shape"]["tokens"], c["outcome"]) for c in cells]
    assert ("gather", 40, "ok") in outcomes and ("gather", 64, "not run") in outcomes
    assert "crash, ended by SIGABRT" in cells[-1]["message"]
    assert len(list(tmp_path.iterdir())) == 2
    assert table.notes(frame(*cells)).loc["gather", "T"] == "64"


@pytest.mark.processes
@pytest.mark.full
def test_who_ends_the_process_costs_nobody_who_was_measured_before():
    peers = {"peers": ["bench_peers:right", "bench_peers:ends_its_process"], "backends": ["gather"]}
    shape = Shape(40, 2, 1, 16, 16, dtype="fp32", config=TINY_CONFIG)
    cells = trials.compare([shape], deadline_s=120, with_dense=False, threads=1, **peers)
    right, late = cells[1:3]
    assert right["outcome"] == "ok" and {"forward", "backward"} <= set(right["latency_ms"])
    assert late["outcome"] == "not run" and "crash, ended by SIGABRT" in late["message"]


def test_a_shape_after_the_budget_is_not_run():
    cells = trials.compare([MAIN], deadline_s=9, budget_s=1e-9, backends=["gather"])
    assert {c["outcome"] for c in cells} == {"not run"}
    assert "the budget of 1e-09 s was used up" in cells[0]["message"]
