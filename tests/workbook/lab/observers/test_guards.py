"""Ends of a training in order, what they say of the cause, and what they leave as it was."""

import json
import math
import os

import guard_ranks
import pytest
import torch
from guard_ranks import Spoilt
from observed import no_sync, trainer
from processes import run_ranks
from tiny_models import tiny

from workbook.lab.observers import guard_rules, guards
from workbook.lab.observers.attention_stats import AttentionStats
from workbook.lab.observers.guards import Guards, Stopped


def guarded(*observers, nonfinite="stop", halt_file=None, bound=guards.BOUND, **settings):
    guard = Guards(halt_file, bound)
    trained = trainer(*observers, guard, nonfinite=nonfinite, **settings)
    return trained, guard


def weights(trained):
    return [p.detach().clone() for p in trained.parameters]


def nan_gradient(module):
    """Make gradients through this module's output NaN; forwards are as they were."""
    module.register_forward_hook(lambda module, args, out: NaNGradient.apply(out))


class NaNGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


def same(one, other):
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def stopped(trained, steps=5):
    """End of the run of so many steps, with the cause."""
    with pytest.raises(Stopped) as caught:
        trained.run(steps)
    return guards.explained(caught.value, trained)


def plant(trained, name, value):
    with torch.no_grad():
        trained.model.get_parameter(name).view(-1)[0] = value


@pytest.mark.filterwarnings("ignore:attention output is not finite")
def test_a_weight_that_is_not_finite_ends_the_run_and_is_named():
    trained, guard = guarded()
    trained.run(2)
    plant(trained, "blocks.1.mlp.up_proj.weight", math.inf)
    before = weights(trained)
    end = stopped(trained)
    assert (end.reason, end.step) == ("non_finite", 2)
    assert str(end).startswith(
        "step 2: the loss is nan; parameter blocks.1.mlp.up_proj.weight already"
    )
    assert end.facts["causes"][0]["weight"] == "blocks.1.mlp.up_proj.weight"
    assert same(weights(trained), before), "the step changed nothing"
    assert [step for step, *_ in guard.take()] == [0, 1, 2]
    with pytest.raises(Stopped, match="left weights that are not finite"):
        guards.check_weights(trained)


@pytest.mark.filterwarnings("ignore:attention output is not finite")
@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("blocks.1.attention.win.v_proj.weight", 3e38, "win.v_proj"),
        ("blocks.1.attention.cmp.k_proj.weight", 1e36, "attention"),
    ],
    ids=["a projection", "a branch"],
)
def test_the_first_output_that_is_not_finite_is_named_by_layer_and_branch(name, value, place):
    trained, _ = guarded(config=tiny(checkpoint="all"))
    with torch.no_grad():
        trained.model.get_parameter(name).fill_(value)
        trained.model.blocks[1].attention.q_proj.weight.mul_(1e4)  # scores overflow, no key does
    end = stopped(trained)
    found = end.facts["causes"][0]
    assert found["weight"] is None and found["largest_weight"] == (pytest.approx(value), name)
    assert found["output"].startswith("blocks.1.attention") and found["output"].endswith(place)
    assert (found["layer"], found["branch"]) == (1, name.split(".")[-3])
    assert f"(layer 1, branch {found['branch']})" in str(end)
    assert end.advice[0].startswith("a smaller learning rate (--lr, now 0.001): the largest weight")


def test_a_backward_alone_that_is_not_finite_is_found_by_its_parameters():
    trained, _ = guarded()
    nan_gradient(trained.model.blocks[1].norm2)
    end = stopped(trained)
    found = end.facts["causes"][0]
    assert (found["output"], math.isfinite(found["loss"])) == (None, True)
    assert (found["gradient"], found["last_gradient"]) == (
        "embed_tokens.weight",
        "blocks.1.norm2.weight",
    )
    told = str(end)
    assert "step 0: the gradient norm is nan; loss and outputs are finite" in told
    assert "the backward is not (layer 1)" in told


def test_a_loss_that_is_not_finite_ends_the_run_though_its_gradient_is():
    trained, _ = guarded(accumulate=2)
    plain, before = trained._loss, weights(trained)
    trained._loss = lambda *part: plain(*part) + math.inf
    assert "every output is finite, and the loss of them is not" in str(stopped(trained))
    assert same(weights(trained), before)


def test_a_finite_gradient_whose_square_is_not_is_told_as_that():
    trained, _ = guarded()
    plain = trained._loss
    trained._loss = lambda *part: plain(*part) * 1e25
    end = stopped(trained)
    assert "the gradient norm is inf; every gradient is finite; the square of the largest" in str(
        end
    )


def test_a_step_that_is_finite_when_run_again_is_told_as_that():
    once = [math.nan]
    trained, _ = guarded()
    plain = trained._loss
    trained._loss = lambda *part: plain(*part) * (once.pop() if once else 1.0)
    assert str(stopped(trained)).endswith("the same step is finite on every rank")


GPU = pytest.param({"device": "cuda"}, marks=pytest.mark.gpu, id="gpu")


@pytest.mark.parametrize("settings", [{}, {"clip": None}, GPU], ids=str)
def test_a_step_left_out_changes_nothing_and_the_next_ones_train(settings, capsys):
    data = Spoilt(1, 2)
    trained, guard = guarded(nonfinite="skip", data=data, lr=1e-2, **settings)
    data.plant(trained)
    trained.run(1)
    before = weights(trained)
    trained.run(2)
    assert same(weights(trained), before)
    trained.run(2)
    guard.settle()
    assert not same(weights(trained), before)
    assert (guard.left_out, trained.skipped_steps, trained.steps_done) == (2, 2, 5)
    assert guard.told().endswith("2 step(s) left out")
    assert "step 1 left out: its loss is nan" in capsys.readouterr().err
    assert [math.isfinite(loss) for _, loss, _ in guard.take()] == [True, False, False, True, True]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(("nonfinite", "trains_on"), [("stop", False), ("skip", True)])
def test_a_trainer_leaves_out_a_bad_step_and_under_stop_all_after_it(
    precision, nonfinite, trains_on
):
    data = Spoilt(1)
    trained = trainer(data=data, nonfinite=nonfinite, precision=precision, lr=1e-2)
    data.plant(trained)
    trained.run(1)
    before = weights(trained)
    trained.run(1)
    assert same(weights(trained), before) and not trained.vitals.isfinite().all()
    trained.run(2)
    assert same(weights(trained), before) is not trains_on


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"cuda_graph": True}, {"precision": "fp16"}], ids=str)
def test_on_a_gpu_no_step_after_a_bad_one_changes_a_weight_though_the_host_hears_later(settings):
    data = Spoilt(7)
    trained, _ = guarded(data=data, device="cuda", lr=1e-2, **settings)
    data.plant(trained)
    trained.run(7)
    before = weights(trained)
    end = stopped(trained, 9)
    assert (end.step, trained.steps_done) == (7, 8 + guards.LAG)
    assert same(weights(trained), before) and end.facts["quantity"] == "loss"
    assert "the loss of them is not" in str(end) or "output of head" in str(end)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_guarded_step_waits_for_the_gpu_by_events_alone(precision):
    trained, _ = guarded(precision=precision, device="cuda")
    trained.run(3)
    with no_sync():
        for step in range(3, 6):
            trained.step(step)


def test_too_many_steps_left_out_in_a_row_end_the_run():
    data = Spoilt(1, 3, 4, 5, 6, value=math.inf)
    trained, _ = guarded(nonfinite="skip", data=data, bound=2)
    data.plant(trained)
    end = stopped(trained, 10)
    assert (end.reason, end.step) == ("non_finite", 5)
    assert "as were 2 steps in a row before it" in str(end)


def test_overflows_that_fp16s_scaler_skips_are_everyday_until_the_scale_is_one():
    trained, guard = guarded(precision="fp16")
    trained.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**3)
    nan_gradient(trained.model.head)
    trained.run(3)
    assert (trained.skipped_steps, guard.left_out, trained.scaler.get_scale()) == (3, 0, 1.0)
    end = stopped(trained)
    assert (end.step, end.facts["quantity"]) == (3, "gradient norm")
    assert "--precision bf16, which has the range of fp32" in end.advice


def test_norms_are_those_before_clipping_and_guards_change_no_number():
    norms = {}
    for clip in (None, 1e-3, 1.0):
        trained, guard = guarded(clip=clip)
        losses = trained.run(3)
        assert losses == trainer(clip=clip).run(3)
        rows = guard.take()
        assert [loss for _, loss, _ in rows] == losses and guard.take() == []
        norms[clip] = rows[0][2]
    assert norms[None] == pytest.approx(norms[1.0]) == pytest.approx(norms[1e-3])
    assert norms[None] > 1e-2


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "asked for it"), ("power cut\nat noon", "asked for it: power cut at noon"), (None, "")],
)
def test_a_halt_file_ends_the_run_after_its_step_with_its_text(tmp_path, text, message):
    class Halts:
        def on_phase(self, name, step):
            if (name, step) == ("data", 2):  # before the guards look for it
                file.mkdir() if text is None else file.write_text(text)

    file = tmp_path / "HALT"
    trained, _ = guarded(Halts(), halt_file=file)
    end = stopped(trained)
    assert (end.reason, end.step, trained.steps_done) == ("halted", 2, 3)
    message = message or f"is there, and cannot be read ({os.strerror(21)})"
    assert str(end) == f"after step 2: the halt file {file} {message}"


def test_guards_need_a_trainer_that_leaves_such_steps_out():
    with pytest.raises(ValueError, match="nonfinite='stop' or 'skip'"):
        guarded(nonfinite=None)


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpus2)])
def ranks(request, tmp_path_factory):
    """Findings of both ranks, of every case, by backend."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(2, "guard_ranks.py", folder, request.param)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", guard_ranks.CASES)
def test_what_one_rank_alone_sees_ends_all_after_the_same_step_with_its_cause(ranks, name):
    if name not in ranks[0]:
        pytest.skip("a CUDA graph needs a GPU")
    first, second = (rank[name] for rank in ranks)
    bad = first["bad step"]
    assert first["rows"][:bad] == second["rows"][:bad] and len(first["rows"]) > bad
    assert first["unchanged"] and second["unchanged"] and first["sum"] == second["sum"]
    assert math.isfinite(first["sum"])
    if "skip" in name:
        assert first["left out"] == second["left out"] == 1
        assert "stop" not in first and first["steps done"] == second["steps done"]
        return
    assert first["stop"] == second["stop"]
    # Nobody waited for a rank that had ended, however busy the machine is.
    assert max(first["seconds"], second["seconds"]) < guard_ranks.TIMEOUT_S
    assert (first["stop"]["step"], first["stop"]["reason"]) == (bad, "non_finite")
    assert "on rank 1" in first["stop"]["message"]
    losses = [cause["loss"] for cause in first["stop"]["causes"]]
    assert math.isfinite(losses[0]) and not math.isfinite(losses[1])


@pytest.mark.processes
@pytest.mark.slow
def test_a_halt_file_ends_all_ranks_after_the_same_step(ranks):
    first, second = (rank["halted"] for rank in ranks)
    assert first["stop"] == second["stop"]
    assert first["stop"]["message"].endswith("asked for it: enough")
    assert first["steps done"] == second["steps done"] <= 2 + 1 + guards.LAG


def limited(*texts, **settings):
    guard = Guards(levels=guard_rules.levels(texts))
    return trainer(guard, nonfinite="stop", **settings), guard


def test_random_tokens_are_flat_at_the_loss_of_a_guess_and_a_run_that_learns_is_not(capsys):
    settings = {"config": tiny(layers=1), "tokens": 16}
    flat, guard = limited("flat=20:warn,24:stop", lr=1e-5, **settings)
    end = stopped(flat, 60)
    assert (end.reason, guard.warnings[0]["guard"]) == ("flat", "flat")
    assert "flat at ln 256 = 5.5452" in str(end) and "(guard flat=24:stop)" in str(end)
    assert capsys.readouterr().err.count("nsa: warning: step") == 1, "a limit is told of once"
    learns, guard = limited("flat=20:stop", data=Repeated(), lr=1e-2, **settings)
    assert learns.run(20)[-1] < 5.3 and guard.warnings == []


class Repeated:
    """One batch, again and again."""

    def batch(self, step, *sizes):
        return Spoilt().data.batch(0, *sizes)


@pytest.mark.parametrize("action", ["warn", "stop"])
def test_memory_is_told_of_in_the_step_in_which_it_crosses_its_limit(monkeypatch, action):
    held = iter([100.0, 100.0, 3000.0, 3000.0, 3000.0])
    monkeypatch.setattr(guards, "resident_mib", lambda: next(held))
    monkeypatch.setattr(guards, "ram_mib", lambda: 8192.0)
    trained, guard = limited(f"memory=2GiB:{action},4GiB:stop")
    if action == "stop":
        end = stopped(trained)
        assert (end.reason, end.step) == ("memory", 2)
        assert "the process holds 2.93 GiB (guard memory=2 GiB:stop)" in str(end)
    else:
        trained.run(5)
        assert [(w["step"], w["guard"]) for w in guard.warnings] == [(2, "memory")]
    with pytest.raises(ValueError, match=r"memory=9 GiB:stop can never be reached: this machine"):
        limited("memory=9GiB:stop")


@pytest.mark.gpu
def test_on_a_gpu_memory_is_what_its_allocator_has_handed_out():
    torch.cuda.reset_peak_memory_stats()
    now = torch.cuda.max_memory_allocated() / 2**20
    trained, _ = limited(f"memory={now + 512:.0f}MiB:stop", device="cuda")
    trained.run(3)
    filled = torch.empty(600 * 2**20, dtype=torch.uint8, device="cuda")
    end = stopped(trained)
    assert (end.reason, end.step) == ("memory", 3) and filled.numel()
    with pytest.raises(ValueError, match="can never be reached"):
        limited("memory=9999GiB:stop", device="cuda")


def test_a_gradient_that_stays_zero_is_told_with_its_parameter(monkeypatch):
    monkeypatch.setattr(guards, "EVERY", 2)
    trained, guard = limited("zero=3:stop")
    with torch.no_grad():
        trained.model.blocks[1].mlp.down_proj.weight.zero_()  # and what feeds it has no gradient
    trained.model.blocks[1].mlp.down_proj.weight.requires_grad_(False)
    end = stopped(trained, 9)
    assert (end.reason, end.step) == ("zero_gradient", 4)
    assert "the gradient of blocks.1.norm2.weight was exactly 0 in the last 3 looks" in str(end)
    for config in (tiny(), tiny(force_branch="win"), tiny(stopgrad_gates=True, phi="mlp")):
        healthy, guard = limited("zero=1:stop", config=config)
        healthy.run(3)
        assert guard.warnings == []


def test_gates_that_collapse_into_one_branch_are_told_with_their_layer():
    settings = {"config": tiny(gate="softmax"), "lr": 1e-6}
    for bias, reason in ((0.0, None), (30.0, "gate_collapse")):
        guard = Guards(levels=guard_rules.levels(["collapse=0.5:stop"]))
        trained = trainer(**settings, nonfinite="stop")
        trained.observers = (AttentionStats(trained.model, every=2, writers=[guard]), guard)
        with torch.no_grad():
            trained.model.blocks[1].attention.gate2.bias[1] = bias
        if reason is None:
            trained.run(5)
            continue
        end = stopped(trained)
        assert (end.reason, end.step) == (reason, 0)
        assert "100% of the gates of layer1 are nearly all in one branch" in str(end)
    guard = Guards(levels=guard_rules.levels(["collapse=0.5:stop"]))
    forced = trainer(config=tiny(force_branch="win"), nonfinite="stop")
    forced.observers = (AttentionStats(forced.model, every=1, writers=[guard]), guard)
    forced.run(1)
