import itertools

import pytest
from places import ROOT, committed_runs
from site_runs import FACTS

from workbook.runs import metrics
from workbook.runs.site import answers, data

SHAPE = {"heads": 64, "kv_heads": 4, "dim": 128, "dtype": "bf16", "queries": "random"}


def run(name, *rows, **more):
    """A run of these rows; T, backend, forward and backward in ms."""
    made = [
        {"operation": "dense_attention" if backend.startswith("dense") else "nsa_attention",
         "metric": "latency", "unit": "ms", "x_name": "tokens", "x_value": tokens, "config": SHAPE,
         "mode": mode, "median": ms, "backend": backend, **more}
        for tokens, backend, *both in rows
        for mode, ms in zip(("forward", "backward"), both, strict=True)
    ]  # fmt: skip
    table = metrics.table([metrics.row(row, FACTS) for row in made])
    return {"run": name, "notebook": "02_x", "verdicts": [], "rows": data.columns(table)}


def rows_of(*runs):
    (table,) = answers.speed(runs)
    return table["rows"]


def test_the_fastest_of_forward_and_backward_together_is_named():
    (row,) = rows_of(run("a", (32768, "triton", 9, 25), (32768, "gather", 1, 90),
                         (32768, "dense-fa4", 27, 75)))  # fmt: skip
    assert row["nsa"]["backend"] == "triton" and row["nsa"]["text"] == "9 + 25"
    assert [other["backend"] for other in row["nsa"]["others"]] == ["gather"]
    assert row["ratio"] == "3.0x faster"
    assert row["said"] == "T 32k: triton, 9 + 25 ms; 3.0x faster than dense-fa4 (27 + 75 ms)"


def test_nsa_is_said_to_be_slower_where_it_is():
    (row,) = rows_of(run("a", (2048, "triton", 2, 2), (2048, "dense-fa4", 1, 1)))
    assert row["ratio"] == "2.0x slower"


def test_the_newest_value_counts_and_two_runs_in_one_line_are_told():
    new, old = run("new", (8192, "triton", 1, 2)), run("old", (8192, "triton", 5, 5),
                                                      (8192, "dense-fa4", 6, 6))  # fmt: skip
    (row,) = rows_of(new, old)
    assert row["nsa"]["run"] == "new" and row["dense"]["run"] == "old"
    assert row["ratio"] == "4.0x faster (of two runs)"


def test_limits_cpus_and_halves_of_a_step_are_no_answers():
    assert answers.speed([run("a", (64, "triton", 1, 2), device="cpu: some")]) == []
    assert answers.speed([run("a", (64, "limit", 1, 2), (64, "dense limit", 1, 2))]) == []
    assert answers.speed([run("a", (64, "triton", 1, None))]) == []


CALL = [{"batch": 2}, {"window": 256}, {"select_count": 8}, {"heads": 32}, {"kv_heads": 8},
        {"dim": 64}, {"value_dim": 64}, {"dtype": "fp16"}, {"queries": "correlated"},
        {"shared_kv": True}, {"of_tomorrow": 1}]  # fmt: skip


@pytest.mark.parametrize("other", CALL, ids=str)
def test_a_call_with_another_setting_changes_no_cell_of_a_table_of_speed(other):
    usual = {**SHAPE, "batch": 1, "window": 512, "select_count": 16, "value_dim": 128}
    rows = (8192, "triton", 1, 2), (8192, "dense-fa4", 2, 2), (32768, "triton", 9, 25)
    slower = [(tokens, name, 2 * a, 3 * b) for tokens, name, a, b in rows]
    here, there = run("a", *rows, config=usual), run("b", *slower, config=usual | other)
    (alone,) = answers.speed([here])
    for runs in itertools.permutations([here, there]):
        tables = answers.speed(runs)
        assert len({table["title"] for table in tables}) == 2
        assert [t["rows"] for t in tables if t["rows"][0]["nsa"]["run"] == "a"] == [alone["rows"]]


TRAINING = [{"layers": 6}, {"preset": "smoke"}, {"precision": "fp32"}, {"checkpoint": "all"},
            {"changes": {"dim": 512}}]  # fmt: skip


@pytest.mark.parametrize("other", TRAINING, ids=str)
def test_a_training_with_another_setting_changes_no_cell_of_a_table(other):
    usual = {"precision": "bf16", "checkpoint": "", "changes": {}}
    here = training("a", ("triton", 300, usual), ("dense", 500, usual))
    there = training("b", ("triton", 30, usual | other), ("dense", 700, usual | other))
    (alone,) = answers.training([here])
    for runs in itertools.permutations([here, there]):
        tables = answers.training(runs)
        assert len({table["title"] for table in tables}) == 2
        assert [t["rows"] for t in tables if t["rows"][0]["nsa"]["run"] == "a"] == [alone["rows"]]


def test_the_front_page_tells_the_row_nearest_to_32k_and_from_where_nsa_wins():
    of = {"device": "NVIDIA H100"}
    rows = [(2048, "triton", 2, 2), (8192, "triton", 3, 3), (65536, "triton", 5, 5)]
    rows += [(2048, "dense-fa4", 1, 1), (8192, "dense-fa4", 4, 4), (65536, "dense-fa4", 90, 90)]
    tables = answers.speed([run("2026-11-21/a", *rows), run("b", *rows[1:2], *rows[4:5], **of)])
    told = answers.front(tables)
    assert (told["tokens"], told["wins"], told["device"]) == (65536, 8192, "NVIDIA H200")
    assert told["dates"] == {"2026-11-21/a": "2026-11-21"}
    assert answers.front(tables, "NVIDIA H100")["tokens"] == 8192
    assert answers.front([]) is None
    alone = answers.front(answers.speed([run("a", (64, "triton", 1, 1))]))
    assert alone["nsa"]["backend"] == "triton" and alone["dense"] is None and alone["wins"] is None


def training(name, *rows):
    made = [
        {"operation": "training", "metric": "tokens_per_second", "unit": "tokens/s",
         "mode": "step", "x_name": "tokens", "x_value": 2048, "median": speed, "backend": backend,
         "config": {"preset": "production", "layers": 12, "ranks": 1, **config}}
        for backend, speed, config in rows
    ]  # fmt: skip
    table = metrics.table([metrics.row(row, FACTS) for row in made])
    return {"run": name, "notebook": "04_x", "verdicts": [], "rows": data.columns(table)}


def test_the_dense_twin_is_no_backend_of_nsa_whatever_it_is_called():
    rows = (("triton", 300, {"attention": "nsa"}), ("auto", 500, {"attention": "dense"}))
    (table,) = answers.training([training("a", *rows)])
    (row,) = table["rows"]
    assert row["nsa"]["text"] == "300" and row["dense"]["text"] == "500"
    assert row["ratio"] == "1.7x slower"
    assert table["title"] == "production, 12 layers, one NVIDIA H200"
    told = answers.front([table])
    assert told["ratio"] == "1.7x slower" and told["wins"] is None and told["tokens"] == 2048


def test_two_ranks_and_observed_steps_are_left_out():
    rows = (("triton", 600, {"ranks": 2}), ("triton", 350, {"observe": True}),
            ("triton", 400, {"compile": True}), ("triton", 300, {}))  # fmt: skip
    (table,) = answers.training([training("a", *rows)])
    best = table["rows"][0]["nsa"]
    assert best["backend"] == "triton, compiled" and best["text"] == "400"
    assert [other["text"] for other in best["others"]] == ["300"]


def test_of_two_batches_the_faster_counts():
    slow, fast = ("triton", 300, {"batch": 1}), ("triton", 400, {"batch": 4})
    for rows in ((slow, fast), (fast, slow)):
        (table,) = answers.training([training("a", *rows)])
        assert table["rows"][0]["nsa"]["text"] == "400"


def peaks(name, *rows, **config):
    made = [
        {"operation": "training_step", "metric": "peak_memory", "unit": "MiB", "mode": "step",
         "x_name": "tokens", "x_value": tokens, "median": mib, "backend": backend,
         "config": {"preset": "production", "layers": 12, **config, **(more[0] if more else {})}}
        for backend, tokens, mib, *more in rows
    ]  # fmt: skip
    table = metrics.table([metrics.row(row, FACTS) for row in made])
    return {"run": name, "rows": data.columns(table)}


def test_what_fits_is_the_largest_that_was_measured():
    rows = (("gather", 2048, 2048), ("gather", 8192, 81920),
            ("masked", 2048, 90000), ("masked", 8192, None))  # fmt: skip
    (found,) = answers.memory([peaks("a", *rows)])
    gather, masked = found["rows"]
    assert gather["largest"] == "8k" and masked["largest"] == "none"
    assert [cell["text"] for cell in gather["cells"]] == ["2", "80"]
    assert masked["cells"][1]["text"] == "not measured"


SETTINGS = [
    {"batch": 4}, {"precision": "fp32"}, {"checkpoint": "all"}, {"ranks": 2}, {"compile": True},
    {"cuda_graph": True}, {"attention": "dense"}, {"optimizer": "sgd"}, {"changes": {"dim": 512}},
]  # fmt: skip


@pytest.mark.parametrize("other", SETTINGS, ids=str)
def test_peaks_under_other_settings_are_in_tables_of_their_own(other):
    usual = {"batch": 1, "precision": "bf16", "checkpoint": "", "ranks": 1, "changes": {}}
    rows = [("gather", tokens, mib, usual) for tokens, mib in ((1024, 437), (2048, 460))]
    rows += [("gather", tokens, mib, usual | other) for tokens, mib in ((1024, 474), (2048, 500))]
    found = {t["title"]: t["rows"][0]["cells"] for t in answers.memory([peaks("a", *rows)])}
    assert len(found) == 2
    assert "production, 12 layers, batch 1, bf16, measured on NVIDIA H200" in found
    gib = sorted([round(1024 * cell["gib"]) for cell in cells] for cells in found.values())
    assert gib == [[437, 460], [474, 500]]


def test_a_row_of_peaks_is_of_one_run_the_newest_with_several_lengths():
    newest = peaks("newest", ("gather", 2048, 1400))
    newer = peaks("newer", ("gather", 2048, 1500), ("gather", 8192, 4500))
    old = peaks("old", *(("gather", tokens, tokens) for tokens in (512, 2048, 8192)))
    (found,) = answers.memory([newest, newer, old])
    assert [cell["run"] for cell in found["rows"][0]["cells"]] == ["newer", "newer"]
    assert answers.memory([newest]) == []


@pytest.fixture(scope="module")
def stored():
    read = [data.collect(folder, ROOT / "runs") for folder in committed_runs()]
    return sorted(read, key=lambda run: run["started"], reverse=True)


def test_of_the_committed_runs_memory_only_grows_with_t(stored):
    """Catch mixed settings: gather had 0.463 GiB at T 1024 and 0.427 at 2048 in one table."""
    tables = answers.memory(stored)
    assert len({table["title"] for table in tables}) == len(tables) > 10
    seen = 0
    for table in tables:
        for row in table["rows"]:
            held = [cell["gib"] for cell in row["cells"] if cell["gib"] is not None]
            assert all(b > 0.995 * a for a, b in itertools.pairwise(held)), (table["title"], row)
            assert len({cell["run"] for cell in row["cells"] if cell["gib"] is not None}) <= 1
            seen += row["backend"] == "gather" and len(held) > 1
    assert seen > 4


def test_of_the_committed_runs_each_training_row_was_measured_and_none_is_a_soaks(stored):
    assert any("soak" in run["run"] and data.rows_of(run, "tokens_per_second") for run in stored)
    for table in answers.training(stored):
        lengths = [row["tokens"] for row in table["rows"]]
        assert lengths == sorted(set(lengths)) and min(lengths) >= 512
        assert all(row["nsa"] for row in table["rows"])
        runs = [row[kind]["run"] for row in table["rows"] for kind in ("nsa", "dense") if row[kind]]
        assert not [run for run in runs if "soak" in run]


def test_who_is_hung_is_told_by_the_newest_run_that_asked():
    claim = "healthy ones called HANG, none wanted: 0 of 109 at load 1"
    asked = {"run": "old", "notebook": "07_x", "verdicts": [{"verdict": "PASS", "claim": claim}]}
    silent = {"run": "new", "notebook": "07_x", "verdicts": []}
    other = {"run": "no", "notebook": "02_x", "verdicts": asked["verdicts"]}
    (said,) = answers.hung([silent, other, asked])
    assert said["run"] == "old" and said["verdict"] == "PASS" and said["claim"] == claim


@pytest.mark.parametrize(("newest", "told"), [("PASS", "many"), ("FAIL", "few")])
def test_of_runs_that_asked_who_is_hung_the_larger_is_told_unless_the_newest_fails(newest, told):
    words = "healthy ones called HANG, none wanted: 0 of"
    few = {
        "run": "few",
        "notebook": "07_x",
        "verdicts": [{"verdict": newest, "claim": f"{words} 3"}],
    }
    claim = f"{words} 109 at load 1; not measured: a, b"
    many = few | {"run": "many", "verdicts": [{"verdict": "INCONCLUSIVE", "claim": claim}]}
    (said,) = answers.hung([few, many])
    assert said["run"] == told
    assert said["short"] == (f"{words} 109 at load 1" if told == "many" else f"{words} 3")
