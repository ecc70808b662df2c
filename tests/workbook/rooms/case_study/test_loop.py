import json
from dataclasses import asdict

import pytest
import torch

from whyhung.process.trial import run_child
from workbook.lab.observers.graph import count_nodes
from workbook.rooms.case_study.figures import BAND_US, MEMORY_MIB, PEAKS_MIB, TIMINGS
from workbook.rooms.case_study.loop import measure
from workbook.rooms.case_study.loop import model as loop
from workbook.rooms.case_study.loop.design import (
    DEFECTS,
    SEQUENTIAL,
    design,
    held,
    parameters,
    peak_mib,
    production,
)
from workbook.rooms.case_study.loop.measure import count, count_kernels
from workbook.rooms.case_study.loop.model import build
from workbook.rooms.case_study.loop.subject import CASE_STUDY, PrintSchedule, last_step, make


def gradients(chosen, tokens, batch=1):
    drawn = torch.randint(256, (batch, tokens + 1), generator=torch.Generator().manual_seed(0))
    model = build(chosen)
    model(drawn[:, :-1], drawn[:, 1:])[1].backward()
    return [p.grad for p in model.parameters()]


def test_the_12_layer_model_has_the_case_studys_parameters():
    with torch.device("meta"):
        found = list(build(production(), device="meta").parameters())
    assert len(found) == 195
    assert sum(p.numel() for p in found) == parameters(production()) == 78_295_332


def test_without_defects_the_loop_is_native_sparse_attention():
    settings = {"tokens": 40}
    right = measure.attention(settings | {"changes": {"defects": []}})
    assert right["defects"] == [] and right["error"] < 1e-12
    one_by_one = {
        name: measure.attention(settings | {"changes": {"defects": [name]}})["error"]
        for name in ("truncated_cache", "one_key", "heads_as_time")
    }
    as_it_was = measure.attention(settings)
    assert min(*one_by_one.values(), as_it_was["error"]) > 0.01
    assert as_it_was["defects"] == list(design("tiny").defects)


def test_the_masked_path_computes_what_the_loop_does():
    chosen = design("tiny", defects=())
    one, other = (gradients(chosen.with_(path=path), 30, 2) for path in ("loop", "masked"))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


ELSEWHERE = {"late_checkpoint", "fp16_adamw", "future_scores"}  # tested on their own


@pytest.mark.parametrize("defect", sorted(set(DEFECTS) - ELSEWHERE))
def test_each_defect_of_attention_changes_what_is_computed(defect):
    right, wrong = (gradients(design("tiny", defects=d), 40) for d in ((), (defect,)))
    assert any(not torch.allclose(a, b, rtol=1e-3) for a, b in zip(right, wrong, strict=True))


def test_future_scores_let_a_later_key_choose_the_blocks():
    torch.manual_seed(0)
    q, keys = torch.randn(40, 1, 2, 2, 8), 3 * torch.randn(1, 20, 2, 8)
    later = keys.clone()
    later[:, 15:] *= 4  # keys that end after token 63

    def chosen(k, defects):
        return [loop.select_ranges(x, k, 60, design("tiny", defects=defects)) for x in q]

    assert chosen(keys, ()) == chosen(later, ())
    assert chosen(keys, ("future_scores",)) != chosen(later, ("future_scores",))


def test_one_causal_query_sees_the_first_key_alone_as_in_torch():
    q, k, v = torch.randn(3, 1, 8), torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    q.requires_grad_()
    made = loop.attend(q, k, v, causal=True)
    torch.testing.assert_close(made, v[:, :1])
    torch.testing.assert_close(
        made, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    )
    made.sum().backward()
    assert not q.grad.any()


def test_heads_as_time_let_head_i_see_the_first_i_keys():
    q, k, v = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5, 8)
    made = loop.attend(q, k, v, causal=True)
    for i in range(3):
        alone = loop.attend(q[i : i + 1], k[: i + 1], v[: i + 1], causal=False)
        torch.testing.assert_close(made[i : i + 1], alone)


def test_a_truncated_cache_leaks_later_tokens_and_then_runs_dry():
    torch.manual_seed(0)
    sizes = {"nsa": {"window": 16}, "defects": ("truncated_cache",)}
    attention = build(design("tiny", **sizes)).blocks[0].attention
    x = torch.randn(1, 48, 32)
    before = attention(x)
    later = x.clone()
    later[:, -1] += 1.0
    changed = (attention(later) - before).abs().amax(-1)[0] > 1e-6
    assert changed[:-1].any(), "a later token changes an earlier output"
    window = [held(design("tiny", **sizes), t).window for t in (16, 48, 49)]
    assert window[2] - window[1] == 4 * 32  # zeros are all that a token beyond 2 w - 1 costs


def test_fp16_adamw_makes_nan_of_a_gradient_that_is_zero():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    weight.grad = torch.tensor([0.0, 1e-4, 1.0], dtype=torch.float16)
    torch.optim.AdamW([weight], foreach=False, fused=False).step()
    assert weight[0].isnan() and not weight[1].isfinite() and weight[2].isfinite()


def test_training_in_fp16_is_nan_from_step_2():
    changes = {"path": "masked", "defects": ["fp16_adamw"]}
    trained = make({"tokens": 16, "changes": changes})
    assert [bool(trained.step(i).isnan()) for i in range(2)] == [False, True]


@pytest.mark.parametrize("schedule", [CASE_STUDY, PrintSchedule(0, 20), PrintSchedule(2, 3)])
def test_the_last_line_is_the_schedules_and_not_the_steps(schedule, capsys):
    settings = {"tokens": 8, "first": schedule.first, "every": schedule.every}
    trained = make(settings | {"changes": {"path": "masked", "defects": ()}})
    for i in range(7):
        trained.step(i)
        assert last_step(capsys.readouterr().out) in (schedule.last_line(i + 1, i + 1), None)
        assert schedule.last_line(7, 7) <= 7


def test_the_case_studys_console_is_silent_between_step_5_and_step_20():
    assert CASE_STUDY.silences(45) == [(5, 20), (20, 40)]
    assert {CASE_STUDY.last_line(s, s - 1) for s in range(5, 20)} == {5}
    assert CASE_STUDY.last_line(1, 0) == 1
    assert CASE_STUDY.last_line(20, 20) == 20


def test_steps_are_read_off_a_console():
    text = "[debug] step 4: input (1, 8)\nstep 0020 | loss 5.6914 | lr 1.00e-05\nother\n"
    assert last_step(text) == 20
    assert last_step("nothing") is None


@pytest.mark.parametrize(("layers", "tokens"), PEAKS_MIB)
def test_shapes_give_the_memory_table_within_3_percent(layers, tokens):
    assert peak_mib(layers, tokens) == pytest.approx(PEAKS_MIB[layers, tokens], rel=0.03)


def test_a_correct_window_would_nearly_have_doubled_the_last_row():
    assert peak_mib(5, 2048, right_window=True) > 1.8 * MEMORY_MIB[2048]


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(
    ("layers", "tokens", "defects", "checkpointing"),
    [(1, 64, SEQUENTIAL, False), (2, 64, SEQUENTIAL, False), (4, 64, SEQUENTIAL, True)],
)
def test_what_is_recorded_is_what_shapes_predict(layers, tokens, defects, checkpointing):
    sizes = {"layers": layers, "dim": 192, "defects": defects}
    spec = {"design": "production", "changes": sizes, "tokens": tokens}
    spec["checkpointing"] = checkpointing
    # In a process without what other tests hold and let go.
    found = run_child("workbook.rooms.case_study.loop.measure:memory", spec, deadline_s=120).result
    assert found["agrees"]
    assert found["peak_mib"] == pytest.approx(found["predicted_mib"], rel=0.02)


def test_of_a_checkpointed_loop_the_first_block_or_the_last_is_the_peak():
    def more(tokens, layers):
        many, one = (held(production(n), tokens, checkpointing=True).total for n in (layers, 1))
        return (many - one) / (layers - 1)

    weights = 4 * (parameters(production(2)) - parameters(production(1)))  # and as many gradients
    assert more(512, 4) == 2 * weights
    assert more(16384, 4) == weights + 4 * 16384 * 768  # the inputs of blocks outgrow gradients
    assert held(production(1), 512, checkpointing=True) == held(production(1), 512)


def test_a_late_bound_checkpoint_spoils_all_gradients_but_the_last_blocks_at_the_same_loss():
    def trained(defects, checkpointing):
        model = build(design("tiny", layers=4, defects=defects), checkpointing=checkpointing)
        drawn = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(0))
        loss = model(drawn[:, :-1], drawn[:, 1:])[1]
        loss.backward()
        return loss, [[p.grad for p in block.parameters()] for block in model.blocks]

    loss, plain = trained(SEQUENTIAL, False)
    for defects, wrong in (((), 0), (("late_checkpoint",), 3)):
        again, blocks = trained((*SEQUENTIAL, *defects), True)
        assert again == loss
        for number, (mine, right) in enumerate(zip(blocks, plain, strict=True)):
            apart = max(float((a - b).norm() / b.norm()) for a, b in zip(mine, right, strict=True))
            assert apart > 0.5 if number < wrong else apart == 0.0


@pytest.mark.gpu
def test_what_a_gpu_records_is_what_shapes_predict_beside_its_libraries_memory():
    # The table's own width: of a narrow model blocks of 512 bytes hold 4 % more than its shapes.
    spec = {"design": "production", "changes": {"layers": 1}, "tokens": 128, "device": "cuda"}
    found = run_child("workbook.rooms.case_study.loop.measure:memory", spec, deadline_s=120).result
    assert found["agrees"] and found["resident_mib"] > 8  # cuBLAS's own
    assert found["peak_mib"] == pytest.approx(found["predicted_mib"], rel=0.03)


@pytest.mark.slow
def test_the_tables_own_model_holds_what_shapes_predict():
    found = measure.memory({"design": "production", "changes": {"layers": 1}, "tokens": 128})
    assert found["peak_mib"] == pytest.approx(found["predicted_mib"], rel=0.01)


@pytest.mark.full
def test_between_steps_4_and_5_nothing_changes_but_weights_moments_and_the_count():
    found = measure.difference({"settings": {"tokens": 12}, "after": 4})
    assert json.loads(json.dumps(found)) == found
    wrong = [row for row in found["rows"] if row["changed"] != row["should"]]
    assert wrong == []
    assert {row["what"] for row in found["rows"]} >= {"tensors' bytes", "graph nodes", "tensors"}


@pytest.mark.full
def test_a_loss_that_is_kept_shows_in_the_state(monkeypatch):
    kept = []
    plain = make.step

    def keep(self, i):
        kept.append(self.model(*self.batch(i))[1])
        return plain(self, i)

    monkeypatch.setattr(make, "step", keep)
    found = measure.difference({"settings": {"tokens": 8}, "after": 2})
    changed = {row["what"] for row in found["rows"] if row["changed"] and not row["should"]}
    assert "tensors with a graph" in changed


def test_aux_stats_and_tracing_change_no_loss():
    losses = []
    for extra in ({}, {"aux_stats": True}, {"tracing": True}):
        trained = make({"tokens": 16, **extra})
        losses.append([float(trained.step(i)) for i in range(2)])
        assert bool(trained.stats) == extra.get("aux_stats", False)
    assert losses[0] == losses[1] == losses[2]


def test_a_design_survives_json():
    chosen = design("smoke", layers=2, nsa={"window": 64})
    assert design("tiny", **json.loads(json.dumps(asdict(chosen)))) == chosen


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: design("smok"), "known are production, smoke, tiny"),
        (lambda: design("tiny", defects=("one_kay",)), "the nearest is 'one_key'"),
        (lambda: design("tiny", path="fast"), "known are loop, masked"),
        (lambda: design("tiny", path="masked"), "'loop' can"),
        (lambda: design("tiny", defects=(), heads=3), "multiple"),
        (lambda: design("tiny", width=3), "width"),
        (lambda: design("tiny", layer=3), "the nearest is 'layers'"),
        (lambda: make({"token": 3}), "has no setting 'token'"),
        (lambda: PrintSchedule(5, 0), "at least 1"),
        (lambda: held(design("tiny", path="masked", defects=()), 8), "counted is 'loop'"),
    ],
)
def test_bad_input_is_named(make_it, message):
    with pytest.raises(ValueError, match=message):
        make_it()


def test_layers_and_tokens_move_seconds_a_hundredfold_and_microseconds_hardly():
    seconds = [timing.seconds for timing in TIMINGS]
    each = [timing.microseconds for timing in TIMINGS]
    assert len(TIMINGS) == 9
    assert max(seconds) > 100 * min(seconds)
    assert BAND_US[0] < min(each) and max(each) < min(BAND_US[1], 1.5 * min(each))


def test_operations_of_forward_and_backward_are_counted_apart():
    x = torch.ones(3, requires_grad=True)
    found = count(lambda: (x * 2).sum())
    assert found.by_name["mul"] == 2  # one of each direction
    assert (found.forward, found.syncs, found.nodes) == (2, 0, 3)
    assert found.total == found.forward + found.backward
    assert count(lambda: x.sum() * float(x[0].item())).syncs == 1


def test_a_node_with_two_uses_is_one_node():
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    assert count_nodes([(y + y).sum()]) == 4
    assert count_nodes([torch.ones(())]) == 0


@pytest.mark.gpu
def test_kernels_are_counted_on_a_gpu():
    x = torch.ones(8, device="cuda")
    assert count_kernels(lambda: x * 2 + 1) == 2
