"""The panels follow what is chosen, refuse what does not fit, and read costs off recorded runs."""

import io
import time

import pytest
from places import committed_root, committed_runs

for needed in ("ipywidgets", "matplotlib", "pandas"):
    pytest.importorskip(needed)

import matplotlib.pyplot as plt  # noqa: E402

from nsa.experiments.explore import costs, panels  # noqa: E402 - they import them
from nsa.workbook import store  # noqa: E402
from nsa.workbook.files import write_json  # noqa: E402
from nsa.workbook.live import LivePanel  # noqa: E402

SLOW_S = 0.060  # for a plain picture
ATTENTION = {"heads": 64, "kv_heads": 4, "dim": 128, "dtype": "bf16", "queries": "random"}


@pytest.fixture
def live():
    return LivePanel(panels.definition("repro", 128))


def test_a_moved_slider_changes_the_picture_and_the_words(live):
    before, words = live.picture.value, live.words.value
    live.controls["query"].value = 30
    assert live.picture.value != before and bytes(live.picture.value).startswith(b"\x89PNG")
    assert "query 30 of T = 128" in live.words.value != words


def test_each_view_has_a_picture_of_its_own(live):
    pictures = set()
    for name in live.panel.views:
        live.view.value = name
        pictures.add(bytes(live.picture.value))
    assert len(pictures) == len(live.panel.views) == 3


def test_a_preset_sets_all_sizes_and_draws_once(live):
    drawn = []
    live.redraw = lambda: drawn.append(live.values())
    live.controls["model"].value = "production"
    (values,) = drawn
    assert {name: values[name] for name in panels.sizes_of("production")} == {
        "compress_block": 32, "compress_stride": 16, "select_block": 64, "select_count": 16,
        "window": 512, "group": 6,
    }  # fmt: skip


def test_sizes_that_do_not_fit_are_told_and_the_picture_stays(live):
    before = live.picture.value
    live.controls["compress_block"].value = 64
    assert "compress_block=64 is larger than select_block=32" in live.message.value
    assert live.picture.value == before
    live.controls["compress_block"].value = 32
    assert live.message.value == "" and live.picture.value != before


@pytest.mark.parametrize(("tokens", "query"), [(32, 24), (1024, 772)])
def test_another_t_keeps_the_query_inside_at_the_same_share_of_it(live, tokens, query):
    assert live.controls["query"].value == 96
    live.controls["tokens"].value = tokens
    assert (live.controls["query"].value, live.controls["query"].max) == (query, tokens - 1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_blocks_are_still_a_selection(live, count):
    live.controls["select_count"].value = count
    assert live.message.value == "" and f"selects {count} of the 4" in live.words.value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "repr"}, "no preset 'repr'; the nearest is 'repro'"),
        ({"query": 128}, r"query=128 must be in 0\.\.127"),
        ({"queries": "white"}, "queries='white' is unknown; known are random, correlated"),
        ({"compress_stride": 24}, "not a multiple of compress_stride=24"),
        ({"weights": "nowhere.pt"}, r"no weights in nowhere\.pt"),
    ],
)
def test_parameters_that_cannot_be_drawn_are_refused_at_once(given, message):
    with pytest.raises(ValueError, match=message):
        panels.definition(**{"model": "repro", "tokens": 128, **given})


def stored(root, name, rows, started="2026-01-01"):
    folder = root / started / name
    folder.mkdir(parents=True)
    write_json(folder / "record.json", {"status": "ok", "started": started, "notebook": name[:2]})
    usual = {"metric": "latency", "mode": "forward", "x_name": "tokens", "device": "NVIDIA T"}
    store.Run(folder).add_rows([usual | row for row in rows])


@pytest.fixture
def recorded(tmp_path):
    """Dense grows as T squared, ours as T; they meet at T = 4096."""
    lines = {
        "triton": ("nsa_attention", lambda t: t / 1024),
        "slow": ("nsa_attention", lambda t: t),
        "dense-flash": ("dense_attention", lambda t: t * t / 2**22),
    }
    rows = [
        {"operation": op, "backend": name, "x_value": t, "median": ms(t), "config": ATTENTION}
        for name, (op, ms) in lines.items()
        for t in (2048, 8192)
    ]
    stored(tmp_path, "02_a", rows)
    failed = rows[0] | {"median": None}
    newer = failed | {"backend": "dense-flash", "operation": "dense_attention", "median": 1.25}
    stored(tmp_path, "02_b", [failed, newer], "2026-01-02")
    incomplete = {"operation": "training_step", "backend": "x", "x_value": 8, "median": 1.0,
                  "metric": "peak_memory", "mode": "step", "config": {"arm": "b"}}  # fmt: skip
    stored(tmp_path, "08_c", [incomplete])
    return tmp_path


@pytest.mark.processes
def test_the_answer_at_t_and_the_break_even_are_read_off_the_runs(recorded):
    found = costs.recorded(recorded)
    (quantity,) = found.quantities()
    (setup,) = found.setups(quantity)
    assert setup == "NVIDIA T, HQ 64, HKV 4, D 128, random queries, bf16"
    told = costs.sentences(found, quantity, setup, 3000)
    assert told[0] == "T = 3000 was not measured; the next longer T is 8192"
    assert told[1] == "at T = 8192 triton takes least: 8 ms; slow 8,192"
    assert told[2] == "dense attention (dense-flash) takes 16 ms there, 2 times as much"
    # 1.25 of the newer run at 2048, where ours takes 2: on the line through both T they meet there
    assert told[3] == "triton takes less than dense from T = 3586 on"
    assert told[4] == "up to T = 8192, their longest, these never do: slow"
    assert "beyond 8192" in costs.sentences(found, quantity, setup, 1 << 20)[0]


@pytest.mark.processes
def test_a_newer_run_counts_where_it_measured_and_takes_nothing_where_it_failed(recorded):
    rows = costs.recorded(recorded).rows.set_index(["backend", "tokens"])
    assert tuple(rows.loc[("dense-flash", 2048), ["value", "run"]]) == (1.25, "02_b")
    assert tuple(rows.loc[("triton", 2048), ["value", "run"]]) == (2.0, "02_a")


@pytest.mark.processes
def test_no_recorded_run_says_which_commands_make_one(tmp_path):
    with pytest.raises(ValueError, match="nsa run backend_comparison"):
        costs.recorded(tmp_path)


@pytest.mark.processes
def test_of_the_committed_runs_every_quantity_and_setup_has_both_pictures():
    if not committed_runs():
        pytest.skip("no runs are committed here")
    panel = panels.cost(committed_root())
    live = LivePanel(panel)
    quantities = live.controls["quantity"].options
    assert set(quantities) == set(costs.QUANTITIES)
    for quantity in quantities:
        live.controls["quantity"].value = quantity
        for view in panel.views:
            live.view.value = view
            assert live.message.value == "" and bytes(live.picture.value).startswith(b"\x89PNG")


@pytest.mark.processes
def test_at_32k_the_committed_runs_name_a_backend_and_dense_beside_it():
    if not committed_runs():
        pytest.skip("no runs are committed here")
    panel = panels.cost(committed_root(), tokens=32768)
    told = panel.told(**panel.start)
    assert told[0].startswith("at T = 32768 ") and "takes least" in told[0]
    assert told[1].startswith("dense attention (")


def plain_picture_s() -> float:
    """Seconds of this process for a picture of one line: how fast it is just now."""
    before = time.process_time()
    figure, axes = plt.subplots(figsize=(10, 4))
    axes.plot(range(512), label="a line")
    axes.legend()
    figure.savefig(io.BytesIO(), format="png")
    plt.close(figure)
    return time.process_time() - before


@pytest.mark.slow
@pytest.mark.parametrize("view", ["keys seen", "selection", "gates"])
@pytest.mark.parametrize("tokens", [512, 4096])
def test_a_picture_follows_a_slider_within_150_ms_of_this_processes_time(view, tokens):
    """Not judged where a plain picture takes so long that a miss would tell of the machine."""
    live = LivePanel(panels.definition("production", tokens))
    live.view.value = view
    spent, plain = [], []
    for query in range(tokens // 2, tokens // 2 + 8):
        before = time.process_time()
        live.controls["query"].value = query
        spent.append(time.process_time() - before)
        plain.append(plain_picture_s())
    if min(spent) >= 0.150 and min(plain) > SLOW_S:
        pytest.skip(f"a slow machine: a plain picture takes it {min(plain):.3f} s")
    assert min(spent) < 0.150
