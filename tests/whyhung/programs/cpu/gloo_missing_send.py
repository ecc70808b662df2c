# due: HANG:collective or STALLED:collective or HANG:recv or STALLED:recv;
# line: receive_activations, second_stage, first_stage; rank: 0; within: 60; ranks: 2; set: first
# A pipeline of two stages: the first has one micro-batch less, so the second waits in recv, the
# first in a barrier.
import torch
import torch.distributed as dist
from torch import nn


def receive_activations(size):
    activations = torch.empty(size)
    dist.recv(activations, src=0)
    return activations


def first_stage(model, count):
    for _ in range(count):
        dist.send(model(torch.randn(4, 64)).detach(), dst=1)


def second_stage(model, count):
    return sum(model(receive_activations((4, 64))).sum().item() for _ in range(count))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Linear(64, 64)
    for step in range(50):
        count = 8
        if step == 40 and rank == 0:
            count = 7  # the last is dropped, as drop_last does
            print("fault", flush=True)
        if rank == 0:
            first_stage(model, count)
        elif rank == 1:
            second_stage(model, count)
        dist.barrier()
    print(f"rank {rank} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
