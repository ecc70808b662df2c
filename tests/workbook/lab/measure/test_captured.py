import json
import re

import pytest
import torch
from places import ROOT

from nsa.attention.branches import select_blocks
from nsa.config import NSAConfig
from nsa.reference.compress import Phi, compress_keys
from workbook.lab.measure import attention_inputs, captured, shapes
from workbook.lab.measure.attention_inputs import RUN, switching, table_for
from workbook.lab.measure.captured import UNITED, distance, fit, real, simulated
from workbook.lab.measure.selections import union_histogram
from workbook.lab.measure.shapes import Shape

CONFIG = NSAConfig(8, 4, select_block=8, select_count=6, window=32)
SHAPE = Shape(1024, 2, 1, 16, 16, dtype="fp32", config=CONFIG)
MIXED = [0.3] * 2 + [0.9] * 6 + [0.98] * 6 + [0.999] * 10  # of a model, in this test


def drawn_histogram(table, seeds):
    """Blocks that queries of the whole sequence select, by the operation's own selection."""
    total = {}
    for seed in range(seeds):
        random = torch.Generator().manual_seed(seed)
        k = torch.randn(1, 1024, 4, 16, generator=random)
        q = switching((1, 1024, 4, 32), table, random, torch.float32)
        q = q.unflatten(3, (2, 16)).flatten(2, 3)
        blocks = select_blocks(q, compress_keys(k, Phi(), CONFIG), CONFIG, 16**-0.5)
        for n, count in union_histogram(blocks, UNITED).items():
            total[int(n)] = total.get(int(n), 0) + count
    return total


@pytest.fixture(scope="module")
def model():
    """Histogram of a whole model's selections, as its description holds it."""
    return drawn_histogram(MIXED, 6)


@pytest.fixture(scope="module")
def table(model):
    return fit(model, SHAPE, tiles=64)


def test_queries_of_the_fitted_table_select_as_the_model_within_five_percent(model, table):
    made = drawn_histogram(table, 4)
    assert distance(real(made, 1024, CONFIG), real(model, 1024, CONFIG)) < 0.05
    one = drawn_histogram([0.98], 1)  # "correlated"
    assert distance(real(one, 1024, CONFIG), real(model, 1024, CONFIG)) > 0.05


def test_the_tiles_at_the_start_which_select_all_there_is_are_left_out(model):
    left = real(model, 1024, CONFIG)
    assert min(left) >= CONFIG.select_count
    beyond = 4 * 6 * (1024 - CONFIG.select_count * CONFIG.select_block) // UNITED
    assert sum(left.values()) == pytest.approx(beyond, rel=0.02)


def test_a_histograms_distance_is_of_its_quantiles():
    assert distance({10: 5, 20: 5}, {10: 1, 20: 1}) == 0.0
    assert distance({11: 3}, {10: 7}) == pytest.approx(0.1)
    assert distance({5: 1, 15: 1}, {10: 1}) == pytest.approx(0.5)


def test_more_change_between_neighbours_selects_more_blocks():
    counts = [simulated([a], SHAPE, 64) for a in (1.0, 0.98, 0.0)]
    means = [sum(n * c for n, c in one.items()) / sum(one.values()) for one in counts]
    assert means[0] < means[1] < means[2] and means[0] < CONFIG.select_count + 1.5


@pytest.mark.parametrize("a", [0.0, 0.9])
def test_a_table_of_one_coefficient_is_an_autoregressive_process_across_runs(a):
    random = torch.Generator().manual_seed(0)
    x = switching((2, 1000, 3, 64), [a], random, torch.float32)
    assert x.shape == (2, 1000, 3, 64)
    assert float(x.var()) == pytest.approx(1.0, abs=0.05)
    for first in (10, RUN - 1):
        pairs = x[:, first::RUN][:, :15], x[:, first + 1 :: RUN][:, :15]
        together = float((pairs[0] * pairs[1]).mean())
        assert together == pytest.approx(a, abs=0.06)


def test_every_run_and_head_draws_its_own_coefficient():
    x = switching((1, 640, 4, 512), [0.0, 1.0], torch.Generator().manual_seed(1), torch.float32)
    same = (x[:, 1:] == x[:, :-1]).all(-1)[0]
    inside = torch.stack([same[start : start + 63] for start in range(0, 640, 64)])
    constant = inside.float().mean(1)
    assert set(constant.flatten().tolist()) == {0.0, 1.0} and 0.2 < float(constant.mean()) < 0.8


def rows(union):
    layer = {"union": {str(UNITED): {str(n): c for n, c in union.items()}}}
    good = {"cell": {"variant": "nsa"}, "outcome": "ok", "selections": {"1024": [layer]}}
    other = good | {"cell": {"variant": "shared-kv"}}
    return [good, good, other, {"cell": {"variant": "nsa"}, "outcome": "diverged"}]


def test_a_description_is_stored_small_and_read_by_the_nearest_length(tmp_path, model, monkeypatch):
    monkeypatch.setattr(captured, "Shape", lambda tokens: SHAPE)
    short = rows(model)[0] | {"selections": {"64": rows(model)[0]["selections"]["1024"]}}
    file = tmp_path / "captured.json"
    made = captured.store([*rows(model), short], file)
    assert json.loads(file.read_text()) == json.loads(json.dumps(made))
    line = made["lengths"]["1024"]
    assert line["union"] == {n: 2 * count for n, count in sorted(model.items())}
    assert line["distance"] < 0.05 and len(line["coefficients"]) == captured.COUNT
    assert table_for(65536, file) == line["coefficients"] and len(file.read_bytes()) < 4096
    with pytest.raises(ValueError, match="no selections of the variant 'nsa' at 96 tokens or more"):
        captured.store([*rows(model)[2:], short], file)


def test_captured_queries_are_a_kind_as_soon_as_they_are_stored(monkeypatch, table):
    monkeypatch.setattr(shapes, "QUERIES", (*shapes.QUERIES, "captured"))
    monkeypatch.setattr(attention_inputs, "table_for", lambda tokens: table)
    one = Shape(1024, 4, 2, 16, 16, dtype="fp32", queries="captured", config=CONFIG)
    first, again = (attention_inputs.draw(one) for _ in range(2))
    assert first.q.shape == (1, 1024, 4, 16) and torch.equal(first.q, again.q)
    assert first.q.requires_grad and float(first.q.detach().var()) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("notebook", ["02_backend_comparison", "90_explore"])
def test_notebooks_name_every_kind_of_queries(notebook):
    """The list of a parameter's comment is what a value is checked against."""
    text = (ROOT / f"notebooks/{notebook}.ipynb").read_text(encoding="utf-8")
    (named,) = re.findall(r"queries: .*one of: ([^\\]*)", text)
    assert tuple(named.split(", ")) == shapes.QUERIES
