# due: healthy; quiet: 25; set: first
# A checkpoint is written in parts, each forced to a slow disk, for 25 s.
import os
import time

import torch
from _shared import SCALE


def save(state, path):
    with open(path, "wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    time.sleep(1.0 * SCALE)


def main():
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    for step in range(20):
        model(torch.randn(4, 1024)).square().mean().backward()
        if step == 10:
            print("quiet", flush=True)
            end, part = time.monotonic() + 25 * SCALE, 0
            while time.monotonic() < end:
                save(model.state_dict(), f"part-{part % 4}.pt")
                part += 1
            print("over", flush=True)


if __name__ == "__main__":
    main()
