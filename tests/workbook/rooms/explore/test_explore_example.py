"""The example is the reference's: whole, at every query, and its words count what it shows."""

import json

import pytest
import torch

from nsa.config import NSAConfig
from nsa.model import saving
from nsa.model.llama import LanguageModel
from nsa.model.presets import preset
from nsa.reference.nsa import nsa
from workbook.lab.measure.attention_inputs import draw
from workbook.rooms.explore import claims, gates, panels, still
from workbook.rooms.explore.example import BRANCHES, DOTS, Choice, Example, keys_seen, sentences

SMALL = NSAConfig(compress_block=8, compress_stride=4, select_block=8, select_count=4, window=12)


def reference_weights(choice: Choice, branch: str):
    """[T, T]: with the s-th value the s-th unit vector, outputs are weights; a mean over heads."""
    drawn = draw(choice.shape)
    units = torch.eye(choice.tokens)[None, :, None]
    k, v = (dict.fromkeys(BRANCHES, x) for x in (drawn.k.detach(), units))
    whole = nsa(drawn.q.detach(), k, v, drawn.gates.detach(), choice.config)
    return whole.branches[branch][0].mean(1), whole.blocks[0, :, 0]


@pytest.mark.parametrize("queries", ["random", "correlated"])
@pytest.mark.parametrize("branch", BRANCHES)
def test_what_is_shown_and_weighed_is_what_the_reference_does(branch, queries):
    choice = Choice(90, 3, queries=queries, config=SMALL)
    example = Example(choice)
    weights, blocks = reference_weights(choice, branch)
    assert torch.equal(example.sees[branch], weights > 0)
    for query in (0, 6, 7, 50, 89):
        seen = example.at(query)
        torch.testing.assert_close(seen.weights[branch], weights[query, : query + 1])
        assert seen.blocks == [int(j) for j in blocks[query] if j >= 0]


def test_of_a_long_sequence_the_dots_are_queries_that_were_really_asked():
    choice = Choice(3 * DOTS, 2, config=SMALL)
    example = Example(choice)
    assert len(example.rows) == DOTS and example.sees["slc"].shape == (DOTS, DOTS)
    rows = example.rows
    for dot in (0, 40, DOTS - 1):
        seen = example.at(int(rows[dot]))
        for branch in BRANCHES:
            shown = example.sees[branch][dot][: dot + 1]
            assert torch.equal(shown, seen.weights[branch][rows[: dot + 1]] > 0)


@pytest.mark.parametrize("query", [0, 6, 7, 8, 31, 32, 89])
def test_keys_counted_are_those_that_get_a_weight(query):
    choice = Choice(90, 2, config=SMALL)
    seen = keys_seen(choice, query)
    weights = Example(choice).at(query).weights
    assert seen["slc"] == int((weights["slc"] > 0).sum())
    assert seen["win"] == int((weights["win"] > 0).sum())
    assert seen["cmp"] == max(0, (query + 1 - 8) // 4 + 1)
    assert seen["dense"] == query + 1


def test_correlated_neighbours_select_fewer_distinct_blocks():
    config = NSAConfig(
        compress_block=8, compress_stride=4, select_block=8, select_count=6, window=8
    )
    distinct = {
        queries: Example(Choice(1024, 4, queries=queries, config=config)).distinct
        for queries in ("random", "correlated")
    }
    assert 6 <= distinct["correlated"] < 0.8 * distinct["random"]


@pytest.mark.parametrize("tokens", [1, 5, 8, 9])
def test_sequences_shorter_than_any_block_have_pictures(tokens):
    example = Example(Choice(tokens, 1, config=SMALL))
    assert example.sees["win"].shape == (tokens, tokens)
    assert sentences(example, tokens - 1)[0].startswith(f"query {tokens - 1} of T = {tokens} sees ")
    assert example.output_norms[1].isfinite().all()


def test_before_training_gates_share_evenly_and_a_checkpoint_has_all_its_layers(tmp_path):
    fresh = gates.gates_of("repro")
    assert fresh.shares.shape == (1, 8, 3) and (fresh.shares - 1 / 3).abs().max() < 0.05
    config = preset("cpu_test", dim=32, head_dim=8)
    model = LanguageModel(config)
    with torch.no_grad():
        for block in model.blocks:  # sigmoid(-20) of two branches, sigmoid(20) of the last
            block.attention.gate2.weight.zero_()
            block.attention.gate2.bias.copy_(torch.tensor([-20.0, -20.0, 20.0]).repeat(8))
    state = {"format": saving.FORMAT, "version": saving.VERSION, "model": model.state_dict()}
    state |= {"configs": {"model": config.to_dict()}, "steps_done": 7}
    saving.write(state, saving.file_of(tmp_path, 7))
    trained = gates.gates_of(str(tmp_path))
    assert trained.name.endswith("after 7 steps")
    assert trained.shares.shape == (2, 8, 3) and bool((trained.shares[..., 2] > 0.99).all())


def test_facts_hold_and_each_breaks_where_the_picture_is_another():
    panel = panels.definition("repro", 200)
    assert all(holds for _, holds in claims.facts(panel))
    example = panels.example_of(panel.start)
    before = example.sees
    broken = {branch: mask.clone() for branch, mask in before.items()}
    broken["win"][100, 20] = broken["slc"][150, 160] = broken["cmp"][120, 30:] = True
    try:
        example.sees = broken
        found = claims.facts(panel)
        (claim,) = claims.all_claims(panel)
    finally:
        example.sees = before
    assert [holds for _, holds in found] == [False, False, True, False, False, True]
    assert claim.verdict == "FAIL" and "2 of 6 facts" in claim.claim


def test_the_sites_explorer_holds_what_the_reference_gives():
    text = (still.STATIC / "explorer-data.js").read_text()
    stored = json.loads(text.removeprefix("window.nsaExamples = ").removesuffix(";\n"))
    assert [one["name"].split(", ")[0] for one in stored] == [shown[0] for shown in still.SHOWN]
    first = still.data(*still.SHOWN[0])
    assert {**stored[0], "importance": None} == {**first, "importance": None}
    one = panels.example_of(panels.definition("repro", 512).start)
    for row in (0, 100, 255):
        t, n = first["rows"][row], len(first["blocks"][row])
        tokens = [s for s in range(512) if s < first["covered"][row]]
        assert len([s for s in first["rows"] if s in tokens]) == int(one.sees["cmp"][row].sum())
        assert first["keys"][row][1] == (n - 1) * first["block"] + t % first["block"] + 1
        assert len(first["importance"][row].rstrip("-")) == t // first["block"] + 1
