# due: healthy; quiet: 30; runs: --pace 5 | --pace 15; set: first
# Training steps that are paced by sleep, 5 or 15 s each: a simulator or a robot gives the time.
import time

import torch
from _shared import SCALE, option


def main():
    pace = option("--pace", 5.0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    print("quiet", flush=True)
    for step in range(int(30 / pace)):
        observation = torch.randn(4, 8)
        loss = model(observation).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(pace * SCALE)
        print(f"step {step}: {loss.item():.4f}", flush=True)
    print("over", flush=True)


if __name__ == "__main__":
    main()
