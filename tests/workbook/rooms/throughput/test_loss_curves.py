"""30 steps on the standard library's text, by every backend, in fp32 and bf16 autocast."""

from functools import cache

import pytest
import torch
from observed import trainer
from tiny_models import tiny

from nsa.attention import registry
from nsa.attention.witness import recording
from nsa.model.data import text

# torch.compile, which flex runs under, reads .grad of every input and hides the warning only from
# the console.
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

STEPS = 30
PRECISIONS = ("fp32", "bf16")
# flash-attn takes no fp32. On a CPU flex_attention has no backward and kernels are interpreted.
BACKENDS = {
    "cpu": [name for name in registry.names() if name not in ("flash", "flex", "triton")],
    "cuda": [name for name in registry.names() if name != "flash"],
}
MARKS = {"cpu": [], "cuda": [pytest.mark.gpu]}
DEVICES = [pytest.param(device, marks=MARKS[device]) for device in BACKENDS]
# The exhibit, which no one trains with, takes half a minute a curve on a CPU.
LONG = [("cpu", "sequential")]
RUNS = [
    pytest.param(
        backend, device, marks=[pytest.mark.long] * ((device, backend) in LONG) + MARKS[device]
    )
    for device, backends in BACKENDS.items()
    for backend in backends
]
# Nats, of about 1.9 by which the loss falls. Rounding alone stays below 1e-6 in fp32, until it
# decides a near-tie between two blocks and a query reads another one.
ALLOWED = {"fp32": 3e-4, "bf16": 0.04}  # 0.0302 on one processor, less than 0.03 on others


@cache
def curve(backend, precision, device, window=16):
    """The losses in nats of one model on one text; two curves differ in the arguments alone."""
    config = tiny(dim=64, head_dim=16, nsa={"window": window}, backend=backend)
    how = {"config": config, "data": text(max_bytes=2**20), "device": device}
    with recording() as witness:
        losses = trainer(**how, tokens=64, lr=3e-3, precision=precision).run(STEPS)
    # A comparison of a backend with itself would pass all that follows.
    assert dict(witness.backends) == {backend: STEPS * config.layers}
    assert len(losses) == STEPS
    return losses


def distance(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("backend", "device"), RUNS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loss_falls_by_the_same_amount_with_every_backend(backend, device, precision):
    losses = curve(backend, precision, device)
    assert losses[0] - losses[-1] > 1.0
    assert distance(losses, curve("masked", precision, device)) < ALLOWED[precision]


@pytest.mark.parametrize(("backend", "device"), RUNS)
def test_bf16_falls_as_fp32_does(backend, device):
    bf16, fp32 = (curve(backend, precision, device) for precision in ("bf16", "fp32"))
    assert distance(bf16, fp32) < ALLOWED["bf16"]


@pytest.mark.parametrize("device", DEVICES)
def test_the_fp32_bound_tells_a_window_that_is_one_token_short(device):
    right, short = (curve("masked", "fp32", device, window) for window in (16, 15))
    assert distance(right, short) > 5 * ALLOWED["fp32"]


def test_flex_says_that_it_cannot_train_on_a_cpu():
    with pytest.raises(ValueError, match="no backward on cpu"):
        curve("flex", "fp32", "cpu")


def test_a_curve_starts_at_the_loss_of_a_guess():
    start = torch.tensor(256.0).log().item()
    assert curve("masked", "fp32", "cpu")[0] == pytest.approx(start, abs=0.15)
