import json
import math
from functools import partial

import observed
import pytest
import torch
from observed import trainer
from tiny_models import refuses_type, tiny

from nsa.model.llama import LanguageModel
from nsa.model.train_config import TrainConfig

half = partial(trainer, precision="fp16")


def rates(count, **settings):
    config = TrainConfig(batch=1, tokens=1, lr=1.0, **settings)
    return [config.rate(step) for step in range(count)]


def test_a_cosine_warms_up_and_ends_at_its_least_rate_where_it_stays():
    cosine = {"schedule": "cosine", "warmup_steps": 4, "steps": 12, "min_lr": 0.1}
    found = rates(20, **cosine)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[11:] == [pytest.approx(0.1)] * 9
    assert found[3:12] == sorted(found[3:12], reverse=True)
    assert found[7] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)


def test_a_constant_rate_needs_no_end_and_a_cosine_hardly_more_than_its_warm_up():
    assert rates(6, warmup_steps=2) == [0.5] + [1.0] * 5
    assert rates(3, warmup_steps=1) == [1.0] * 3
    for steps in (5, 6):
        assert rates(6, schedule="cosine", warmup_steps=5, steps=steps)[4] == 1.0


@pytest.mark.parametrize(("schedule", "last"), [("cosine", 1e-3), ("constant", 1e-2)])
def test_the_optimizer_is_given_the_rate_of_its_step(schedule, last):
    trained = trainer(steps=6, lr=1e-2, min_lr=1e-3, schedule=schedule, warmup_steps=2)
    seen = []
    for step in range(6):
        trained.step(step)
        seen.append([group["lr"] for group in trained.optimizer.param_groups])
    assert seen == [[trained.config.rate(step)] * 2 for step in range(6)]
    assert seen[0] == [pytest.approx(5e-3)] * 2 and seen[-1] == [pytest.approx(last)] * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8' is unknown; known are fp32, bf16"),
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"tokens": 0}, "tokens=0 must be at least 1"),
        ({"warmup_steps": 0}, "warmup_steps=0 must be at least 1"),
        ({"schedule": "linear"}, "schedule='linear' is unknown; known are constant"),
        ({"schedule": "cosine"}, "schedule='cosine' needs steps"),
        ({"schedule": "cosine", "steps": 5}, "steps=5 end before warmup_steps=10 do"),
        ({"min_lr": 1.0}, "min_lr=1.0 is more than lr=0.001"),
        ({"lr": math.nan}, "lr=nan must be finite and greater than 0"),
        ({"clip": 0.0}, "clip=0.0 must be finite and greater than 0"),
        ({"betas": (0.9, 1.0)}, "betas=1.0 must be finite and at least 0 and less"),
        ({"accumulate": 3}, "batch=4 is not a multiple of accumulate=3; .*: 3 and 6"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
    ],
)
def test_settings_that_cannot_train_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"batch": 4, "tokens": 32, **wrong})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr", "1e-3", "YAML reads 1e-4 as text"),
        ("tokens", 32.0, "tokens=32.0 is not an int"),
        ("compile", 1, "compile=1 is not a bool"),
    ],
)
def test_a_setting_of_the_wrong_type_is_refused(name, value, message):
    refuses_type(TrainConfig(4, 32), name, value, message)


def test_a_config_comes_back_from_json():
    config = TrainConfig(4, 32, steps=9, schedule="cosine", warmup_steps=3, clip=None)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="no field warmup; the nearest is 'warmup_steps'"):
        TrainConfig.from_dict({"batch": 1, "tokens": 8, "warmup": 3})
    with pytest.raises(ValueError, match="no field step; the nearest is 'steps'"):
        config.with_(step=3)
    with pytest.raises(ValueError, match="needs tokens as well; it got batch"):
        TrainConfig.from_dict({"batch": 1})


def overflow(*steps):
    """An observer that puts an infinity into a gradient of these steps."""

    def spoil(model, step):
        if step in steps:
            model.head.weight.grad[0, 0] = float("inf")

    return observed.AtOptimizer(spoil)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_it_computes_in_its_precision_and_keeps_weights_and_states_in_fp32(precision, dtype):
    trained, seen = trainer(precision=precision), []
    down = trained.model.blocks[0].mlp.down_proj
    down.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    trained.step(0)
    assert seen == [dtype]
    states = trained.optimizer.state.values()
    kept = [*trained.model.parameters(), *(s["exp_avg"] for s in states)]
    assert {x.dtype for x in kept} == {torch.float32}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_overflow_skips_the_step_halves_the_scale_and_is_counted(clip, device):
    trained = half(overflow(1, 2), clip=clip, device=device)
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


def test_a_first_step_that_is_skipped_is_counted_and_without_a_scaler_none_is():
    trained, plain = half(overflow(0)), trainer()
    for _ in range(2):
        trained.run(1)
        assert trained.skipped_steps == 1
    plain.run(2)
    assert plain.skipped_steps == 0
    assert not plain.scaler.is_enabled()


def test_small_gradients_survive_fp16_only_because_the_loss_is_scaled():
    zeros = []

    def count(model, step):
        gradient = model.blocks[0].attention.q_proj.weight.grad
        zeros.append((gradient == 0).float().mean().item())

    for enabled in (True, False):
        trained = half(observed.AtOptimizer(count))
        # Gradients of 1e-7 and less, as those of a large batch's single tokens are.
        trained.scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        forward = trained.wrapped.forward
        trained.wrapped.forward = lambda *given, f=forward: (None, f(*given)[1] * 1e-4)
        trained.step(0)
    scaled, plain = zeros
    assert plain > scaled + 0.2


def test_narrow_weights_are_refused_and_wide_ones_are_not():
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is bfloat16: updates smaller than"):
        half(model=LanguageModel(tiny()).bfloat16())
    message = (
        r"embed_tokens\.weight is fp16: AdamW's eps of 1e-8 becomes 0.*precision='bf16' would do"
    )
    with pytest.raises(ValueError, match=message):
        half(model=LanguageModel(tiny()).half())
    half(model=LanguageModel(tiny()).double())
    # fp16 weights would be NaN at the second step
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.tensor([0.0, 1.0], dtype=torch.float16)
    optimizer.step()
    assert weight.isnan().tolist() == [True, False]
