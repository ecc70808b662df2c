from collections import Counter

import pytest
import torch
from tiny_models import gradients, tiny, tokens
from torch.utils.checkpoint import CheckpointError, checkpoint

from nsa.attention.witness import recording
from nsa.model.llama import LanguageModel

RANGES = {1: ["all"], 2: ["all", "0:1", "1:2"], 4: ["all", "0:1", "1:3", "3:4", ":2", "2:"]}
CASES = [(layers, text) for layers, texts in RANGES.items() for text in texts]


def model_of(layers, **changes):
    torch.manual_seed(0)
    return LanguageModel(tiny(layers=layers, **changes))


def wrong_gradients(right, found):
    """Names of the parameters whose gradient has other bits."""
    assert found.keys() == right.keys()
    return {name for name, gradient in right.items() if not torch.equal(found[name], gradient)}


def forwards_per_block(model):
    """{index: forward calls} during one loss and its backward."""
    calls = Counter()
    hooks = [
        block.register_forward_pre_hook(lambda b, _: calls.update([b.index]))
        for block in model.blocks
    ]
    gradients(model)
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize(("layers", "text"), CASES)
@pytest.mark.parametrize("phi", ["mean", "mlp"])
def test_gradients_are_bit_equal_with_checkpointing_on_and_off(layers, text, phi):
    off = gradients(model_of(layers, phi=phi))
    on = gradients(model_of(layers, phi=phi, checkpoint=text))
    assert wrong_gradients(off, on) == set()


@pytest.mark.parametrize(("layers", "text"), CASES)
def test_the_layers_recomputed_are_exactly_those_of_the_range(layers, text):
    model = model_of(layers, checkpoint=text)
    chosen = model.recompute(text)
    assert len(chosen) > 0
    expected = {index: 2 if index in chosen else 1 for index in range(layers)}
    with recording() as seen:
        assert forwards_per_block(model) == expected
    assert seen.backends["gather"] == sum(expected.values())


def test_bf16_autocast_is_recomputed_alike():
    def under_autocast(text):
        model = model_of(2, checkpoint=text)
        with torch.autocast("cpu", torch.bfloat16):
            _, loss = model(tokens(2), tokens(2, seed=1))
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    assert wrong_gradients(under_autocast(""), under_autocast("all")) == set()


def test_a_late_binding_closure_would_be_caught():
    healthy, broken = model_of(2), model_of(2)

    def late_bound(x, *context, seen=None):
        """The case study's defect: the lambda reads the loop's variable when the loop has ended."""
        for block in broken.blocks:
            x = checkpoint(lambda *args: block(*args), x, *context, use_reentrant=False)  # noqa: B023
        return x

    broken.run_blocks = late_bound
    read, targets = tokens(2), tokens(2, seed=1)
    assert torch.equal(healthy(read, targets)[1], broken(read, targets)[1])  # the loss hides it

    wrong = wrong_gradients(gradients(healthy), gradients(broken))
    assert any(name.startswith("blocks.0.") for name in wrong)
    assert forwards_per_block(broken) == {0: 1, 1: 3}


def test_a_recomputation_that_differs_is_an_error():
    model = model_of(2, checkpoint="all")
    block = model.blocks[0]
    forward, calls = block.forward, []

    def saves_more_the_second_time(x, *context):
        calls.append(x)
        x = forward(x, *context)
        return x if len(calls) == 1 else x * x.sigmoid()

    block.forward = saves_more_the_second_time
    with pytest.raises(CheckpointError):
        gradients(model)


def test_less_is_saved_for_the_backward():
    def saved_bytes(text):
        model = model_of(4, checkpoint=text)
        total = 0

        def count(tensor):
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(tokens(), tokens(seed=1))
        return total

    none, half, whole = saved_bytes(""), saved_bytes("0:2"), saved_bytes("all")
    assert whole < 0.2 * none
    assert half == pytest.approx((none + whole) / 2, rel=0.1)


def test_checkpointing_can_be_changed_and_switched_off_from_outside():
    model = model_of(4, checkpoint="all")
    names = list(model.state_dict())
    assert list(model.recompute("1:2")) == [1]
    assert forwards_per_block(model) == {0: 1, 1: 2, 2: 1, 3: 1}
    assert list(model.recompute("")) == []
    assert forwards_per_block(model) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert list(model.state_dict()) == names
    with pytest.raises(ValueError, match="checkpoint='0:6' does not fit 4 layers"):
        model.recompute("0:6")
