# due: healthy; quiet: 25; runs: --by storage | --by processor | --by start; set: first
# One sample in the middle waits 25 s for its storage or is computed that long, in one of a loader's
# two workers; or both workers fetch something as they start.
import subprocess
import time

import torch
from _shared import SCALE, option
from torch.utils.data import DataLoader, Dataset


def decode(seconds):
    end, total = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        total += sum(i * i for i in range(1000)) % 7
    return total


def fetch(worker):
    subprocess.run(["sleep", str(26 * SCALE)], check=True)


class Images(Dataset):
    def __init__(self, by):
        self.slow = {"storage": time.sleep, "processor": decode}.get(by)

    def __len__(self):
        return 120

    def __getitem__(self, i):
        if i == 60 and self.slow:
            self.slow(26 * SCALE)
        return torch.full((16,), float(i))


def main():
    by = option("--by", "storage", "processor", "start")
    model, start = torch.nn.Linear(16, 1), fetch if by == "start" else None
    loader = DataLoader(Images(by), 10, num_workers=2, worker_init_fn=start)
    print("quiet", flush=True)
    for batch in loader:
        model(batch).mean().backward()
    print("over", flush=True)


if __name__ == "__main__":
    main()
