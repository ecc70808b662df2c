# due: healthy; quiet: 45; ranks: 2; set: late
# Every rank scores its answers in pure Python, rank 1 for 45 s longer; the scores are gathered.
import difflib
import random
import time

import torch
import torch.distributed as dist
from _shared import SCALE, join


def score(seconds):
    end, ratios, draw = time.monotonic() + seconds, [], random.Random(0)
    while True:
        texts = [[draw.choice("abcdef") for _ in range(400)] for _ in range(2)]
        ratios.append(difflib.SequenceMatcher(None, *texts, autojunk=False).ratio())
        if time.monotonic() > end:
            return sum(ratios) / len(ratios)


def main():
    rank, device = join()
    model = torch.nn.Linear(128, 128).to(device)
    for epoch in range(3):
        answers = model(torch.randn(64, 128, device=device))
        dist.all_reduce(answers)
        if epoch == 1 and rank == 1:
            print("quiet", flush=True)
            mine = score(45 * SCALE)
            print("over", flush=True)
        else:
            mine = score(0.5)
        scores = [None] * dist.get_world_size()
        dist.all_gather_object(scores, mine)
        if rank == 0:
            print(f"epoch {epoch}: {scores}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
