# due: healthy; quiet: 25; runs: --by reading | --by sorting; set: first
# A DataLoader's workers open a large archive for 25 s before the first batch.
import random
import time

import torch
from _shared import SCALE, option
from torch.utils.data import DataLoader, Dataset


def read_archive(seconds):
    with open(__file__) as file:
        lines = file.readlines()
    for _ in lines:
        time.sleep(seconds / len(lines))
    return lines[0]


def sort_archive(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        names = sorted(str(random.random()) for _ in range(50_000))
    return names[0]


class Archive(Dataset):
    def __init__(self, by):
        self.open_it = {"reading": read_archive, "sorting": sort_archive}[by]
        self.index = None

    def __len__(self):
        return 200

    def __getitem__(self, i):
        if self.index is None:
            self.index = self.open_it(25 * SCALE)
        return torch.full((16,), float(i))


def main():
    by = option("--by", "reading", "sorting")
    model = torch.nn.Linear(16, 1)
    print("quiet", flush=True)
    for step, batch in enumerate(DataLoader(Archive(by), 10, num_workers=2)):
        if step == 0:
            print("over", flush=True)
        model(batch).mean().backward()


if __name__ == "__main__":
    main()
