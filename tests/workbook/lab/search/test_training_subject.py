import contextlib
import math
import re
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from observed import AtOptimizer

from nsa.attention.api import nsa_attention
from nsa.config import NSAConfig
from nsa.model import layer, rotary
from whyhung.process.runner import Spec, run
from whyhung.verdict import judge
from whyhung.watch import Progress, read
from workbook.lab import attached
from workbook.lab.search.factors import TRAINING_SUBJECT
from workbook.lab.search.training_subject import branchwise, by_branches, make

SMALL = {"layers": 1, "tokens": 48, "device": "cpu", "backend": "gather"}


@pytest.fixture
def trained(tmp_path):
    """Two steps of the subject with some settings: (losses, subject)."""
    made = []

    def train(**settings):
        progress = Progress(tmp_path / f"progress{len(made)}")
        subject = make(SMALL | settings, progress)
        made.append((subject, progress))
        return [float(subject.step(i)) for i in range(2)], subject

    yield train
    for subject, progress in made:
        subject.close()
        progress.close()


def test_it_trains_counts_and_tells_what_ran(trained, tmp_path):
    losses, subject = trained()
    assert losses[1] < losses[0] and len(list(subject.model.parameters()))
    found = subject.witness()
    assert set(found["paths"]) >= {"cmp", "slc", "win"} and found["wrapped"] == "LanguageModel"
    p, _ = read(tmp_path / "progress0")
    assert p.step == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"selected_backend": "masked", "window_backend": "sdpa"},
        {"compressed_backend": "masked"},
        {"checkpoint": "all"},
        {"aux_stats": True, "tracing": "all"},
        {"anomaly": True, "deterministic": True, "strict": True},
        {"allocator": "", "launch_blocking": False},
        {"backend": "auto", "conservative": True},
        {"tracing": "updates"},
    ],
)
def test_what_must_not_change_the_training_does_not(trained, settings):
    plain, _ = trained()
    losses, _ = trained(**settings)
    assert losses == pytest.approx(plain, abs=2e-6)


@pytest.mark.parametrize(
    "settings",
    [{"branch": "win"}, {"dim": 64}, {"layers": 2}, {"seed": 3}, {"dtype": "bf16"},
     {"weights": "bf16"}, {"warmup_steps": 1}, {"changes": {"phi": "mlp"}}, {"data": "text"}],
)  # fmt: skip
def test_what_must_change_the_training_does(trained, settings):
    assert trained(**settings)[0] != trained()[0]


def test_a_backend_of_a_branch_serves_that_branch_alone(trained):
    def served(**settings):
        return {b: set(p) for b, p in trained(**settings)[1].witness()["paths"].items()}

    plain, other = served(), served(selected_backend="masked")
    assert plain["slc"] != other["slc"]
    assert plain["win"] == other["win"] and plain["cmp"] == other["cmp"]


def test_a_forced_branch_has_its_backend_and_its_missing_gradients_are_expected(trained):
    _, subject = trained(branch="slc", selected_backend="masked")
    assert "win" not in subject.witness()["paths"]
    assert any("win.k_proj" in name for name in subject.without_gradient)


def test_unsafe_packing_loses_gradients_and_says_that_it_is_unsafe(trained):
    _, subject = trained(safe_packing=False)
    assert subject.witness()["packing"] == "unsafe"
    lost = set()

    def look(model, step):
        lost.update(n for n, p in model.named_parameters() if p.grad is None)

    subject.trainer.observers = (AtOptimizer(look, subject.model),)
    subject.step(2)
    assert any("q_proj" in name for name in lost) and any("gate1" in name for name in lost)
    assert not any("mlp" in name or "o_proj" in name for name in lost)


def test_conservative_turns_every_optimisation_off_at_once(trained):
    _, subject = trained(backend="auto", conservative=True)
    assert {name for of in subject.witness()["paths"].values() for name in of} <= {
        "dense-mask-matmul", "score-chunks",
    }  # fmt: skip
    assert torch.are_deterministic_algorithms_enabled() and not rotary.has_kernel(torch.ones(1))
    assert all(not g["fused"] and not g["foreach"] for g in subject.trainer.optimizer.param_groups)
    assert subject.trainer.config.precision == "fp32" and not subject.trainer.config.compile


def test_anomaly_mode_finds_a_planted_root_by_name_and_line(trained):
    told = pytest.warns(UserWarning, match="Error detected in SqrtBackward0")
    with told, pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan") as caught:
        trained(planted="root", anomaly=True)
    (note,) = caught.value.__notes__
    assert re.fullmatch(
        r'the forward of SqrtBackward0: File ".*planted.py", line \d+, in rooted: '
        r"return output \+ torch.where\(zero > 0, torch.sqrt\(zero\), 0.0\)",
        note,
    )


def test_the_planted_root_leaves_the_loss_as_it_was_and_spoils_the_gradients(trained):
    plain, subject = trained()
    spoilt = make(SMALL | {"planted": "root"}, subject.trainer.observers[0])
    found = {}

    def look(model, step):
        found.update((n, p.grad.isnan().any()) for n, p in model.named_parameters())

    spoilt.trainer.observers = (AtOptimizer(look, spoilt.model),)
    with contextlib.closing(spoilt):
        assert float(spoilt.step(0)) == plain[0]
    assert found["embed_tokens.weight"] and not found["norm.weight"]


@pytest.mark.parametrize(
    ("lr", "told"), [(8e-8, 0.0015), (1e-5, 0.16), (6e-5, 0.56), (2e-4, 0.998)]
)
def test_bf16_weights_change_as_far_as_the_case_study_told_and_their_rounding_estimates(lr, told):
    """A weight changes where lr, a first AdamW update, is at least half its distance to the next
    bf16 number, 2 ** (exponent - 8)."""
    given = {"preset": "production", "layers": 1, "weights": "bf16", "warmup_steps": 1, "lr": lr}
    subject = make(SMALL | given | {"tracing": "updates"}, SimpleNamespace())
    with contextlib.closing(subject):
        weights = torch.cat([p.detach().float().flatten() for p in subject.model.parameters()])
        half = torch.exp2(weights.abs().log2().floor() - 8)
        estimated = (half <= lr).float().mean().item()
        subject.step(0)
        (row,) = subject.result()["updates"]
    assert row["weights"] == "bfloat16"
    assert row["changed"] == pytest.approx(estimated, rel=0.03)
    assert row["changed"] == pytest.approx(told, rel=0.15)


def test_fp32_weights_change_at_the_rates_at_which_bf16_weights_rest(trained):
    _, subject = trained(lr=1e-5, warmup_steps=1, tracing="updates")
    assert min(row["changed"] for row in subject.result()["updates"]) > 0.95


def test_closing_puts_back_what_was_changed(trained):
    _, subject = trained(window_backend="sdpa", anomaly=True, deterministic=True)
    assert layer.nsa_attention is not nsa_attention
    assert torch.is_anomaly_enabled() and torch.are_deterministic_algorithms_enabled()
    subject.close()
    assert layer.nsa_attention is nsa_attention
    assert not torch.is_anomaly_enabled() and not torch.are_deterministic_algorithms_enabled()


def test_closing_a_conservative_one_puts_the_rotary_kernel_back(trained):
    before = rotary.has_kernel
    _, subject = trained(backend="auto", conservative=True)
    assert rotary.has_kernel is not before
    subject.close()
    assert rotary.has_kernel is before


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"layers": 0}, "layers=0: must be"), ({"changes": {"windw": 3}}, "no field windw")],
)
def test_what_could_not_be_made_is_refused_and_leaves_nothing_changed(settings, message):
    with pytest.raises(ValueError, match=message):
        make(SMALL | {"window_backend": "sdpa"} | settings, None)
    assert layer.nsa_attention is nsa_attention


def test_without_a_backend_of_its_own_the_attention_is_left_alone():
    with branchwise({"cmp": None, "slc": None, "win": None}):
        assert layer.nsa_attention is nsa_attention
    with branchwise({"cmp": "masked"}):
        assert layer.nsa_attention is not nsa_attention


def test_one_that_ends_late_leaves_a_later_one_as_it_is():
    forgotten = branchwise({"cmp": "masked"})
    forgotten.__enter__()
    layer.nsa_attention = nsa_attention
    with branchwise({"win": "sdpa"}):
        later = layer.nsa_attention
        forgotten.__exit__(None, None, None)
        assert layer.nsa_attention is later
    assert layer.nsa_attention is nsa_attention


def test_branches_one_by_one_are_the_whole():
    config = NSAConfig(
        compress_block=8, compress_stride=4, select_block=8, select_count=4, window=16
    )
    q, gates = torch.randn(1, 40, 4, 8), torch.rand(1, 40, 4, 3)
    k, v = ({b: torch.randn(1, 40, 2, 8) for b in ("cmp", "slc", "win")} for _ in range(2))
    whole = nsa_attention(q, k, v, gates, config, backend="masked")
    backends = {"cmp": "gather", "slc": "masked", "win": "sdpa"}
    torch.testing.assert_close(by_branches(q, k, v, gates, config, backends=backends), whole)


@pytest.mark.processes
@pytest.mark.slow
def test_a_trial_in_anomaly_mode_ends_at_the_line_of_the_planted_root(tmp_path):
    spec = Spec(TRAINING_SUBJECT, SMALL | {"planted": "root", "anomaly": True})
    verdict = judge(run(spec, folder=tmp_path / "trial", attached=attached.PATH))
    assert verdict.label == "CRASH:RuntimeError"
    assert re.search(r"SqrtBackward0.*planted.py., line \d+, in rooted", verdict.because[0])
    spec = Spec(TRAINING_SUBJECT, SMALL | {"planted": "root"}, steps=1, oracles=("finite",))
    verdict = judge(run(spec, folder=tmp_path / "plain", attached=attached.PATH))
    assert verdict.kind == "FAIL" and "planted.py" not in " ".join(verdict.because)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """Losses of 120 steps on text in a precision, at a rate of a warm-up, and steps skipped."""

    @cache
    def made(name):
        progress = Progress(tmp_path_factory.mktemp("learnt") / "progress")
        given = {"tokens": 64, "batch": 2, "lr": 3e-5, "data": "text"} | PRECISIONS[name]
        subject = make(SMALL | given, progress)
        losses = [float(subject.step(i)) for i in range(120)]
        subject.close()
        progress.close()
        return losses, subject.trainer.skipped_steps

    return made


PRECISIONS = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "pure bf16": {"weights": "bf16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
def test_autocast_over_fp32_weights_learns_what_fp32_does_in_120_steps(learnt, name):
    (plain, _), (losses, skipped) = learnt("fp32"), learnt(name)
    assert all(map(math.isfinite, losses)) and skipped <= 2  # the scaler begins too high
    assert abs(sum(losses[-20:]) / sum(plain[-20:]) - 1) < 0.01
    assert sum(plain[-20:]) < 0.85 * sum(plain[:20])  # there was something to learn


@pytest.mark.slow
def test_bf16_weights_waste_a_warm_up(learnt):
    plain, losses = learnt("fp32")[0], learnt("pure bf16")[0]
    assert sum(losses[-20:]) / sum(plain[-20:]) - 1 > 0.1
