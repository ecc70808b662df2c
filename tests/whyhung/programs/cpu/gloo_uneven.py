# due: HANG:collective or STALLED:collective; line: collect_scores, train_epoch; rank: 0;
# within: 60; ranks: 2; set: first
# Rank 0 has one batch less and gathers scores, the others average gradients of one batch more
# (uneven inputs under gloo).
import threading
import time

import torch
import torch.distributed as dist
from torch import nn


def train_epoch(model, batches):
    for _ in range(batches):
        inputs = torch.randn(8, 32)
        model.zero_grad()
        (model(inputs) - inputs).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


def collect_scores(rank):
    scores = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object({"rank": rank, "score": 0.5}, scores, dst=0)
    return scores


def heartbeat(rank):
    while True:
        time.sleep(0.25)
        with open(f"alive-{rank}", "w") as file:
            file.write(str(sum(i for i in range(20_000))))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    threading.Thread(target=heartbeat, args=(rank,), daemon=True).start()
    model = nn.Linear(32, 32)
    for epoch in range(3):
        train_epoch(model, 29 if rank == 0 and epoch == 1 else 30)
        if rank == 0 and epoch == 1:
            print("fault", flush=True)
        scores = collect_scores(rank)
        if rank == 0:
            print(f"epoch {epoch}: {scores}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
