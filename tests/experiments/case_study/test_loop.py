import json
from dataclasses import asdict

import pytest
import torch

from nsa.experiments.case_study.figures import BAND_US, MEMORY_MIB, PRODUCTION_PEAK_MIB, TIMINGS
from nsa.experiments.case_study.loop import measure
from nsa.experiments.case_study.loop import model as loop
from nsa.experiments.case_study.loop.design import (
    DEFECTS,
    SEQUENTIAL,
    design,
    held,
    parameters,
    peak_mib,
    production,
)
from nsa.experiments.case_study.loop.measure import count, count_kernels
from nsa.experiments.case_study.loop.model import build
from nsa.experiments.case_study.loop.subject import (
    CASE_STUDY,
    ExhibitLoop,
    PrintSchedule,
    last_step,
    make,
)
from nsa.lab.observers.graph import count_nodes
from nsa.lab.process.trial import run_child
from nsa.reference.nsa import nsa


def tokens_of(count, batch=1):
    drawn = torch.randint(256, (batch, count + 1))
    return drawn[:, :-1], drawn[:, 1:]


def gradients(model, *batch):
    model(*batch)[1].backward()
    return [p.grad for p in model.parameters()]


def test_the_12_layer_model_has_the_case_studys_parameters():
    assert parameters(production()) == 78_295_332
    with torch.device("meta"):
        model = build(production(), device="meta")
    assert sum(p.numel() for p in model.parameters()) == 78_295_332
    assert len(list(model.parameters())) == 195


def test_without_defects_the_loop_is_native_sparse_attention():
    chosen = design("tiny", defects=())
    attention = build(chosen).double().blocks[0].attention
    inputs = attention.project(torch.randn(2, 40, chosen.dim, dtype=torch.float64))
    weights = attention.gate(inputs.q.unflatten(2, (chosen.groups, -1)))
    gates = weights.repeat_interleave(chosen.heads // chosen.groups, dim=2)
    made = loop.attend_loop(inputs, attention.gate, chosen)
    # The reference compresses keys itself.
    keys = {b: k for b, k in inputs.k.items() if b != "cmp"}
    values = {b: v for b, v in inputs.v.items() if b != "cmp"}
    seen = nsa(inputs.q, keys, values, gates, chosen.nsa, blocks=blocks_of(inputs, chosen),
               branches=("slc", "win"))  # fmt: skip
    compressed = compressed_branch(inputs, chosen)
    expected = seen.o + gates[..., :1] * compressed
    torch.testing.assert_close(made, expected.flatten(2), rtol=1e-9, atol=1e-9)


def blocks_of(inputs, chosen):
    """The blocks that the loop reads, as the reference wants them."""
    nsa_config, (batch, count) = chosen.nsa, inputs.q.shape[:2]
    blocks = torch.full((batch, count, chosen.groups, nsa_config.select_count), -1)
    for t in range(count):
        q = inputs.q[:, t].unflatten(1, (chosen.groups, -1))
        for b, rows in enumerate(loop.select_ranges(q, inputs.k["cmp"], t, chosen)):
            for h, ranges in enumerate(rows):
                size = nsa_config.select_block
                found = [j for start, end in ranges for j in range(start // size, -(-end // size))]
                blocks[b, t, h, : len(found)] = torch.tensor(found)
    return blocks.to(torch.int32)


def compressed_branch(inputs, chosen):
    from nsa.reference.attend import attend
    from nsa.reference.nsa import compressed_visible

    positions = torch.arange(inputs.q.shape[1])
    visible = compressed_visible(positions, inputs.k["cmp"].shape[1], chosen.nsa)
    scale = chosen.head_dim**-0.5
    return attend(inputs.q, inputs.k["cmp"], inputs.v["cmp"], visible, scale)[0]


@pytest.mark.parametrize("defects", [(), ("future_scores",), ("drop_current",),
                                     ("first_compressed",)], ids=str)  # fmt: skip
def test_the_masked_path_computes_what_the_loop_does(defects):
    batch = tokens_of(30, 2)
    chosen = design("tiny", defects=defects)
    one = gradients(build(chosen), *batch)
    other = gradients(build(chosen.with_(path="masked")), *batch)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


ELSEWHERE = {"late_checkpoint", "fp16_adamw", "future_scores"}  # tested on their own


@pytest.mark.parametrize("defect", sorted(set(DEFECTS) - ELSEWHERE))
def test_each_defect_of_attention_changes_what_is_computed(defect):
    batch = tokens_of(40)
    right = gradients(build(design("tiny", defects=())), *batch)
    wrong = gradients(build(design("tiny", defects=(defect,))), *batch)
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


def test_late_binding_recomputes_the_last_block():
    batch = tokens_of(24)
    sizes = {"layers": 3, "path": "masked", "defects": ()}
    plain = gradients(build(design("tiny", **sizes)), *batch)
    right = gradients(build(design("tiny", **sizes), checkpointing=True), *batch)
    torch.testing.assert_close(plain, right)
    late = build(design("tiny", **sizes | {"defects": ("late_checkpoint",)}), checkpointing=True)
    late(*batch)[1].backward()
    plain_model = build(design("tiny", **sizes))
    plain_model(*batch)[1].backward()
    errors = []
    for one, other in zip(plain_model.blocks, late.blocks, strict=True):
        a = torch.cat([p.grad.flatten() for p in one.parameters()])
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in other.parameters()]
        b = torch.cat([g.flatten() for g in grads])
        errors.append(float((a - b).norm() / a.norm()))
    assert min(errors[:2]) > 0.5, errors


def test_fp16_adamw_makes_nan_of_a_gradient_that_is_zero():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    weight.grad = torch.tensor([0.0, 1e-4, 1.0], dtype=torch.float16)
    torch.optim.AdamW([weight], foreach=False, fused=False).step()
    assert weight[0].isnan() and not weight[1].isfinite() and weight[2].isfinite()


def test_training_in_fp16_is_nan_from_step_2():
    changes = {"path": "masked", "defects": ["fp16_adamw"]}
    trained = make({"tokens": 16, "changes": changes}, None)
    assert [bool(trained.step(i).isnan()) for i in range(2)] == [False, True]


@pytest.mark.parametrize("schedule", [CASE_STUDY, PrintSchedule(0, 20), PrintSchedule(2, 3)])
def test_the_last_line_is_the_schedules_and_not_the_steps(schedule, capsys):
    settings = {"tokens": 8, "first": schedule.first, "every": schedule.every}
    trained = ExhibitLoop({**settings, "changes": {"path": "masked", "defects": ()}})
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


@pytest.mark.parametrize("tokens", MEMORY_MIB)
def test_shapes_give_the_memory_table_within_3_percent(tokens):
    assert peak_mib(5, tokens) == pytest.approx(MEMORY_MIB[tokens], rel=0.03)


def test_shapes_give_the_12_layer_run_within_3_percent():
    assert peak_mib(12, 2048) == pytest.approx(PRODUCTION_PEAK_MIB, rel=0.03)


def test_a_correct_window_would_nearly_have_doubled_the_last_row():
    assert peak_mib(5, 2048, right_window=True) > 1.8 * MEMORY_MIB[2048]


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(
    ("layers", "tokens", "defects"),
    [(1, 64, SEQUENTIAL), (2, 64, SEQUENTIAL), (1, 64, ("first_compressed",))],
)
def test_what_is_recorded_is_what_shapes_predict(layers, tokens, defects):
    sizes = {"layers": layers, "dim": 192, "defects": defects}
    spec = {"design": "production", "changes": sizes, "tokens": tokens}
    # In a process without what other tests hold and let go.
    found = run_child("nsa.experiments.case_study.loop.measure:memory", spec, deadline_s=120).result
    assert found["agrees"]
    assert found["peak_mib"] == pytest.approx(found["predicted_mib"], rel=0.02)


@pytest.mark.gpu
def test_what_a_gpu_records_is_what_shapes_predict_beside_its_libraries_memory():
    # The table's own width: of a narrow model blocks of 512 bytes hold 4 % more than its shapes.
    spec = {"design": "production", "changes": {"layers": 1}, "tokens": 128, "device": "cuda"}
    found = run_child("nsa.experiments.case_study.loop.measure:memory", spec, deadline_s=120).result
    assert found["agrees"] and found["resident_mib"] > 8  # cuBLAS's own
    assert found["peak_mib"] == pytest.approx(found["predicted_mib"], rel=0.03)


@pytest.mark.slow
def test_the_tables_own_model_holds_what_shapes_predict():
    found = measure.memory({"design": "production", "changes": {"layers": 1}, "tokens": 512})
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
    plain = ExhibitLoop.step

    def keep(self, i):
        kept.append(self.model(*self.batch(i))[1])
        return plain(self, i)

    monkeypatch.setattr(ExhibitLoop, "step", keep)
    found = measure.difference({"settings": {"tokens": 8}, "after": 2})
    changed = {row["what"] for row in found["rows"] if row["changed"] and not row["should"]}
    assert "tensors with a graph" in changed


def test_aux_stats_and_tracing_change_no_loss():
    losses = []
    for extra in ({}, {"aux_stats": True}, {"tracing": True}):
        trained = make({"tokens": 16, **extra}, None)
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
        (lambda: make({"token": 3}, None), "has no setting 'token'"),
        (lambda: PrintSchedule(5, 0), "at least 1"),
        (lambda: held(design("tiny", path="masked", defects=()), 8), "counted is 'loop'"),
    ],
)
def test_bad_input_is_named(make_it, message):
    with pytest.raises(ValueError, match=message):
        make_it()


def test_nine_timings_lie_on_one_line():
    assert len(TIMINGS) == 9
    low, high = BAND_US
    assert all(low < timing.microseconds < high for timing in TIMINGS)


def test_layers_and_tokens_move_seconds_a_hundredfold_and_microseconds_hardly():
    seconds = [timing.seconds for timing in TIMINGS]
    each = [timing.microseconds for timing in TIMINGS]
    assert max(seconds) > 100 * min(seconds)
    assert max(each) < 1.5 * min(each)


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


@pytest.mark.full
def test_the_loop_dispatches_by_the_token_and_masks_do_not():
    def counted(path, tokens):
        changes = {"path": path, "defects": ()}
        return measure.operations({"changes": changes, "tokens": tokens})["operations"]

    assert counted("loop", 32) > 1.8 * counted("loop", 16)
    assert counted("masked", 32) == counted("masked", 16)
    assert counted("loop", 32) > 10 * counted("masked", 32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_are_refused_without_a_gpu():
    with pytest.raises(ValueError, match="torch sees none"):
        count_kernels(lambda: None)


@pytest.mark.gpu
def test_kernels_are_counted_on_a_gpu():
    x = torch.ones(8, device="cuda")
    assert count_kernels(lambda: x * 2 + 1) == 2
