# due: healthy; quiet: 25; runs: --by lbfgs | --by accumulation; set: late
# One step of an optimizer takes 25 s: LBFGS calls its closure again and again, or micro-batches
# are accumulated.
import time

import torch
from _shared import SCALE, option


def lbfgs_step(model, inputs, seconds):
    optimizer = torch.optim.LBFGS(
        model.parameters(), 1e-4, max_iter=10**9, max_eval=10**9, tolerance_grad=-1
    )
    end = time.monotonic() + seconds

    def closure():
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        if time.monotonic() > end:
            raise TimeoutError
        return loss

    try:
        optimizer.step(closure)
    except TimeoutError:
        print("stopped in time", flush=True)


def accumulated_step(model, inputs, seconds):
    optimizer = torch.optim.AdamW(model.parameters())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        (model(inputs) - inputs).square().mean().backward()
    optimizer.step()


def main():
    by = option("--by", "lbfgs", "accumulation")
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256)
    )
    step = {"lbfgs": lbfgs_step, "accumulation": accumulated_step}[by]
    print("quiet", flush=True)
    step(model, torch.randn(512, 256), 25 * SCALE)
    print("over", flush=True)


if __name__ == "__main__":
    main()
