# due: healthy; quiet: 25; runs: --by function | --by hook | --by penalty; set: first
# One backward takes 25 s in Python: in a function of the user's, in a hook, or in many gradients of
# gradients.
import time

import torch
from _shared import SCALE, option


def smooth(seconds):
    end, total = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        total = (total * 31 + sum(map(int, str(total + 1)))) % 1_000_003
    return total


class Smooth(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        return inputs.tanh()

    @staticmethod
    def backward(context, gradient):
        smooth(25 * SCALE)
        return gradient


def penalized(model, inputs, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()


def train_step(model, by, slow):
    inputs = torch.randn(8, 16, requires_grad=True)
    loss = model(inputs).square().mean()
    if slow and by == "function":
        loss = Smooth.apply(loss)
    if slow and by == "hook":
        model[0].bias.register_hook(lambda gradient: gradient + 0 * smooth(25 * SCALE))
    loss.backward()
    if slow and by == "penalty":
        penalized(model, inputs, 25 * SCALE)


def main():
    by = option("--by", "function", "hook", "penalty")
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    train_step(model, by, slow=False)
    print("quiet", flush=True)
    train_step(model, by, slow=True)
    print("over", flush=True)


if __name__ == "__main__":
    main()
