# due: healthy; quiet: 25; runs: --metric distance | --metric overlap; set: first
# A metric in pure Python takes 25 s after an epoch.
import collections
import itertools
import random
import time

import torch
from _shared import SCALE, option


def distance(left, right):
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        last, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (a != b))
    return row[-1]


def overlap(left, right):
    pairs = [collections.Counter(itertools.pairwise(text)) for text in (left, right)]
    return sum((pairs[0] & pairs[1]).values())


def evaluate(metric):
    print("quiet", flush=True)
    scores, end = [], time.monotonic() + 25 * SCALE
    while time.monotonic() < end:
        texts = ["".join(random.choices("abcdefgh", k=300)) for _ in range(2)]
        scores.append(metric(*texts))
    print("over", flush=True)
    return sum(scores) / len(scores)


def main():
    metric = option("--metric", "distance", "overlap")
    model = torch.nn.Linear(16, 16)
    for epoch in range(2):
        for _ in range(50):
            model(torch.randn(8, 16)).square().mean().backward()
        if epoch == 0:
            print("score", evaluate({"distance": distance, "overlap": overlap}[metric]))


if __name__ == "__main__":
    main()
