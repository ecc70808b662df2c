import math
import warnings
from contextlib import nullcontext

import pytest
import torch
from observed import AtOptimizer, no_sync, trainer
from tiny_models import tiny
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.attention import witness
from nsa.model.data import synthetic, text
from nsa.model.llama import LanguageModel


class Diary:
    """An observer that writes down what it is told."""

    def __init__(self):
        self.phases, self.losses, self.gradients, self.places = [], [], {}, []
        self.model = None

    def on_phase(self, name, step):
        self.phases.append((step, name))
        self.places.append(witness.place())
        if self.model is not None:
            self.gradients[name] = self.model.head.weight.grad is not None

    def on_step(self, step, loss):
        self.losses.append((step, loss))


class SyncWatch(TorchDispatchMode):
    """Notes operations whose result the host waits for, but in the optimizer.

    AdamW reads its step counters there, which live on the host on every device.
    """

    WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2")

    def __init__(self):
        super().__init__()
        self.phase, self.waits = "before", []

    def on_phase(self, name, step):
        self.phase = name

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in self.WAITING and self.phase != "optimizer":
            self.waits.append((self.phase, name))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "precision", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.full)]
)
def test_the_loss_on_real_text_falls(precision):
    losses = trainer(data=text(max_bytes=2**20), lr=1e-2, precision=precision).run(14)
    assert losses[0] == pytest.approx(math.log(256), abs=0.15)
    assert losses[-1] < losses[0] - 1.0
    assert all(map(math.isfinite, losses))


def test_the_loss_on_random_tokens_stays_that_of_a_guess():
    losses = trainer(batch=4, lr=1e-3).run(12)
    assert sum(losses[-4:]) / 4 == pytest.approx(math.log(256), abs=0.1)


def test_one_seed_gives_the_same_losses_to_the_last_bit_in_parts_observed_or_recomputed():
    plain = trainer(seed=5).run(4)
    torch.randn(11)
    halves = trainer(seed=5)
    assert halves.run(2) + halves.run(2) == plain
    assert halves.steps_done == 4
    assert halves.run(0) == []
    assert trainer(seed=5, config=tiny(checkpoint="all")).run(4) == plain
    assert trainer(Diary(), object(), seed=5).run(4) == plain
    assert trainer(seed=6).run(4) != plain
    model = LanguageModel(tiny())
    before = model.head.weight.clone()
    trainer(model=model, seed=None)
    assert torch.equal(model.head.weight, before), "without a seed weights stay as they came"


def test_observers_are_told_each_phase_of_each_micro_batch_at_its_start():
    diary = Diary()
    watched = trainer(diary)
    diary.model = watched.model
    losses = watched.run(2)
    names = ["data", "forward", "backward", "optimizer", "end"]
    assert diary.phases == [(step, name) for step in (0, 1) for name in names]
    assert diary.places == ["step 0"] * 5 + ["step 1"] * 5
    assert [(step, loss.item()) for step, loss in diary.losses] == list(enumerate(losses))
    assert not any(loss.requires_grad for _, loss in diary.losses)
    assert {name for name, there in diary.gradients.items() if there} == {"optimizer"}
    trainer(halves := Diary(), accumulate=2).step(0)
    pair = ["forward", "backward"]
    assert [name for _, name in halves.phases] == ["data", *pair, *pair, "optimizer", "end"]


def test_a_step_does_not_make_the_host_wait():
    with SyncWatch() as watch:
        trainer(watch).step(0)
    # The witness looks at each layer's output at once on a CPU, where nothing is waited for.
    assert watch.waits == [("forward", "_local_scalar_dense")] * tiny().layers


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_does_not_wait_for_the_gpu(precision):
    watched = trainer(precision=precision, device="cuda")
    assert watched.optimizer.param_groups[0]["fused"] is True
    watched.step(0)
    with no_sync():
        watched.step(1)


def test_the_optimizer_is_adamw_as_documented_and_only_matrices_decay():
    model = LanguageModel(tiny(phi="mlp"))
    optimizer = trainer(model=model, lr=3e-4).optimizer
    assert type(optimizer) is torch.optim.AdamW
    for group in optimizer.param_groups:
        assert group["betas"] == (0.9, 0.95)
        assert (group["lr"], group["eps"], group["amsgrad"]) == (3e-4, 1e-8, False)
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    names = {p: name for name, p in model.named_parameters()}
    assert {names[p].rpartition(".")[2] for p in plain["params"]} == {"weight", "bias"}
    assert all("norm" in names[p] or "bias" in names[p] for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_left_from_before_do_not_enter_the_first_step(frozen):
    def losses(soiled):
        model = LanguageModel(tiny())
        model.norm.weight.requires_grad_(not frozen)  # a frozen one would still count in clipping
        if soiled:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 3.0)
        return trainer(model=model).run(3)

    assert losses(soiled=True) == losses(soiled=False)


def test_each_run_warns_of_its_own_non_finite_outputs_once():
    broken = trainer()
    broken.run(1)
    weight = broken.model.blocks[1].attention.win.v_proj.weight
    for outside in (nullcontext, nullcontext, witness.recording):
        broken.model.reset_parameters(0)
        with torch.no_grad():
            weight[0, 0] = float("nan")
        with outside() as outer, pytest.warns(RuntimeWarning) as warned:
            broken.run(2)
        assert len(warned) == 1
        assert f"layer 1, step {broken.steps_done - 2}" in str(warned[0].message)
    assert outer.non_finite()["layer 1"] == 2
    broken.model.reset_parameters(0)
    with warnings.catch_warnings(), witness.recording() as outer:
        warnings.simplefilter("error")
        broken.run(1)
    assert outer.non_finite() == {}


@pytest.mark.parametrize("clip", [None, 1e-3, 1.0])
def test_gradients_are_clipped_to_the_norm_that_is_asked_for(clip):
    def enlarge(model, step):
        for parameter in model.parameters():
            parameter.grad.mul_(1e3)

    watched = trainer(AtOptimizer(enlarge), clip=clip)
    step, norms = watched.optimizer.step, []

    def noting():
        squares = [p.grad.square().sum() for p in watched.model.parameters()]
        norms.append(torch.stack(squares).sum().sqrt().item())
        step()

    watched.optimizer.step = noting
    watched.step(0)
    assert norms[0] > 100 if clip is None else norms == [pytest.approx(clip, rel=1e-4)]


def gradients_at_the_optimizer(**changes):
    """{name: gradient} as the optimizer of step 0 finds them."""
    found = {}

    def keep(model, step):
        found.update({name: p.grad.clone() for name, p in model.named_parameters()})

    loss = trainer(AtOptimizer(keep), batch=4, clip=None, **changes).step(0)
    return loss, found


class Scored:
    """Random tokens of which each row scores another number of targets."""

    def batch(self, step, batch, tokens, device="cpu"):
        drawn, targets = synthetic(seed=0).batch(step, batch, tokens, device)
        keep = torch.arange(tokens) < 3 + 5 * torch.arange(batch)[:, None]
        return drawn, torch.where(keep, targets, -100)


@pytest.mark.parametrize("data", [synthetic(seed=0), Scored()], ids=["all scored", "some scored"])
@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulated_micro_batches_equal_the_large_batch(accumulate, data):
    loss, whole = gradients_at_the_optimizer(data=data)
    mean, parts = gradients_at_the_optimizer(data=data, accumulate=accumulate)
    assert mean.item() == pytest.approx(loss.item(), rel=1e-6)
    scale = max(x.abs().max().item() for x in whole.values())
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6 * scale)


def test_observers_are_looked_at_when_given_and_not_in_a_step():
    class Counted:
        lookups = 0

        def __getattr__(self, name):
            Counted.lookups += name.startswith("on_")
            return object.__getattribute__(self, "told" if name == "on_step" else name)

        def told(self, step, loss):
            pass

    watched = trainer(Counted())
    before = Counted.lookups
    watched.run(2)
    assert before > 0
    assert Counted.lookups == before


def test_observers_start_once_and_are_closed():
    class Life:
        def __init__(self):
            self.told = []

        def on_start(self, trainer):
            self.told.append(("start", trainer.steps_done))

        def close(self):
            self.told.append("close")

    first, second = Life(), Life()
    watched = trainer(first)
    watched.run(1)
    watched.observers = (first, second)
    watched.close()
    assert first.told == [("start", 0), "close"]
    assert second.told == [("start", 1), "close"]


def test_evaluation_has_its_own_batches_and_changes_nothing():
    trained, plain, drawn = trainer(), trainer(), []

    class Noting:
        def batch(self, step, *sizes):
            drawn.append(step)
            return synthetic(seed=0).batch(step, *sizes)

    trained.data = Noting()
    losses = trained.run(1)
    found = trained.evaluate(3)
    assert trained.evaluate(3) == found
    assert trained.evaluate(1, first_step=5, data=synthetic(seed=9)) != found
    assert losses + trained.run(1) == plain.run(2)
    assert min(drawn[1:4]) > 10**9
    assert drawn[4:7] == drawn[1:4]
    assert found == pytest.approx(math.log(256), abs=0.15)
    for training in (False, True):
        trained.model.train(training)
        trained.evaluate(1)
        assert trained.model.training is training, "the mode is left as it was"
    with pytest.raises(ValueError, match="batches=0 must be at least 1"):
        trained.evaluate(0)
    one, other = (trainer(data=Scored(), batch=4, accumulate=parts) for parts in (1, 4))
    assert one.evaluate(2) == pytest.approx(other.evaluate(2), rel=1e-6)


def test_a_value_that_is_not_finite_is_named_by_layer_and_step():
    broken = trainer(config=tiny(strict=True))
    broken.run(1)
    with torch.no_grad():
        broken.model.blocks[1].attention.win.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="'win' at layer 1, step 1"):
        broken.run(1)
