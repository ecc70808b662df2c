import math
from functools import partial

import observed
import pytest
import torch
from tiny_models import tiny

from nsa.model.data import text
from nsa.model.llama import LanguageModel

trainer = partial(observed.trainer, precision="fp16")


def overflow(*steps):
    """An observer that puts an infinity into a gradient of these steps."""

    def spoil(model, step):
        if step in steps:
            model.head.weight.grad[0, 0] = float("inf")

    return observed.AtOptimizer(spoil)


@pytest.mark.full
def test_fp16_trains():
    losses = trainer(data=text(max_bytes=2**20), lr=1e-2).run(14)
    assert losses[-1] < losses[0] - 1.0
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_it_computes_in_its_precision_and_keeps_weights_and_states_in_fp32(precision, dtype):
    trained, seen = trainer(precision=precision), []
    down = trained.model.blocks[0].mlp.down
    down.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    trained.step(0)
    assert seen == [dtype]
    states = trained.optimizer.state.values()
    kept = [*trained.model.parameters(), *(s["exp_avg"] for s in states)]
    assert {x.dtype for x in kept} == {torch.float32}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_overflow_skips_the_step_halves_the_scale_and_is_counted(clip, device):
    trained = trainer(overflow(1, 2), clip=clip, device=device)
    trained.run(1)
    scale, weight = trained.scaler.get_scale(), trained.model.head.weight.clone()
    trained.run(2)
    assert torch.equal(trained.model.head.weight, weight)
    assert trained.scaler.get_scale() == scale / 4
    assert trained.skipped_steps == 2
    trained.run(1)
    assert not torch.equal(trained.model.head.weight, weight)
    assert trained.skipped_steps == 2
    assert trained.steps_done == 4


def test_steps_that_are_skipped_before_any_other_are_counted():
    trained = trainer(overflow(0))
    trained.run(1)
    assert trained.skipped_steps == 1
    trained.run(1)
    assert trained.skipped_steps == 1


def test_without_a_scaler_no_step_is_skipped():
    trained = trainer(precision="fp32")
    trained.run(2)
    assert trained.skipped_steps == 0
    assert not trained.scaler.is_enabled()


def test_small_gradients_survive_fp16_only_because_the_loss_is_scaled():
    zeros = []

    def count(model, step):
        gradient = model.blocks[0].attention.q_proj.weight.grad
        zeros.append((gradient == 0).float().mean().item())

    for enabled in (True, False):
        trained = trainer(observed.AtOptimizer(count))
        # Gradients of 1e-7 and less, as those of a large batch's single tokens are.
        trained.scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        forward = trained.wrapped.forward
        trained.wrapped.forward = lambda *given, f=forward: (None, f(*given)[1] * 1e-4)
        trained.step(0)
    scaled, plain = zeros
    assert plain > scaled + 0.2


def test_narrow_weights_are_refused_and_wide_ones_are_not():
    with pytest.raises(ValueError, match=r"embed\.weight is bfloat16: updates smaller than"):
        trainer(model=LanguageModel(tiny()).bfloat16())
    message = r"embed\.weight is fp16: AdamW's eps of 1e-8 becomes 0.*precision='bf16' would do"
    with pytest.raises(ValueError, match=message):
        trainer(model=LanguageModel(tiny()).half())
    trainer(model=LanguageModel(tiny()).double())


def test_fp16_weights_would_be_nan_at_the_second_step():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.tensor([0.0, 1.0], dtype=torch.float16)
    optimizer.step()
    assert weight.isnan().tolist() == [True, False]
