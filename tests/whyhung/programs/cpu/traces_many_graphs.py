# due: healthy; quiet: 25; runs: --mode forward | --mode backward; set: late
# torch.compile traces one new network after another for 25 s (a cold start, without a compiler of
# C++).
import time

import torch
from _shared import SCALE, option
from torch import nn


class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x.mean(-1, keepdim=True)
        return x


def warm_up(mode, seconds):
    end, depth = time.monotonic() + seconds, 2
    while time.monotonic() < end:
        torch.compiler.reset()
        model = torch.compile(Net(depth), backend="aot_eager", dynamic=False)
        out = model(torch.randn(depth, 32))
        if mode == "backward":
            out.sum().backward()
        depth += 1
    return depth


def main():
    mode = option("--mode", "forward", "backward")
    print("quiet", flush=True)
    depth = warm_up(mode, 25 * SCALE)
    print("over", flush=True)
    print("depth", depth)


if __name__ == "__main__":
    main()
