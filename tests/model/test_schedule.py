import json
import math

import pytest
from observed import trainer

from nsa.model.train_config import TrainConfig


def rates(count, **settings):
    config = TrainConfig(batch=1, tokens=1, lr=1.0, **settings)
    return [config.rate(step) for step in range(count)]


def test_a_cosine_warms_up_and_ends_at_its_least_rate():
    cosine = {"schedule": "cosine", "warmup_steps": 4, "steps": 12, "min_lr": 0.1}
    found = rates(12, **cosine)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[-1] == pytest.approx(0.1)
    assert found[3:] == sorted(found[3:], reverse=True)
    assert found[7] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)


def test_beyond_its_end_a_cosine_stays_at_its_least_rate():
    found = rates(20, schedule="cosine", warmup_steps=2, steps=8, min_lr=0.2)
    assert found[8:] == [pytest.approx(0.2)] * 12


def test_a_constant_rate_stays_and_needs_no_end():
    assert rates(6, warmup_steps=2) == [0.5] + [1.0] * 5
    assert rates(3, warmup_steps=1) == [1.0] * 3


@pytest.mark.parametrize("steps", [5, 6])
def test_a_cosine_that_is_hardly_longer_than_its_warm_up_has_no_zero_to_divide_by(steps):
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
    # Under jaxtyping's hook its own TypeError comes first; both name the field.
    with pytest.raises(TypeError, match=name):
        TrainConfig(**{"batch": 4, "tokens": 32, name: value})
    config = TrainConfig(4, 32)
    object.__setattr__(config, name, value)
    with pytest.raises(TypeError, match=message):
        config.__post_init__()


def test_a_config_comes_back_from_json():
    config = TrainConfig(4, 32, steps=9, schedule="cosine", warmup_steps=3, clip=None)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="no field warmup; the nearest is 'warmup_steps'"):
        TrainConfig.from_dict({"batch": 1, "tokens": 8, "warmup": 3})
    with pytest.raises(ValueError, match="no field step; the nearest is 'steps'"):
        config.with_(step=3)
    with pytest.raises(ValueError, match="needs tokens as well; it got batch"):
        TrainConfig.from_dict({"batch": 1})
