# due: HANG:collective or STALLED:collective or HANG:recv or STALLED:recv; line: swap_halo;
# rank: 0 or 1; within: 30; ranks: 2; set: first
# Two neighbours receive before they send: each waits for what the other has queued behind its own
# receive (send/recv deadlock).
import torch
import torch.distributed as dist
from _shared import join


def swap_halo(field, rank, neighbour, careful):
    edge, halo = field[-1].contiguous(), torch.empty_like(field[-1])
    if careful and rank < neighbour:
        dist.send(edge, neighbour)
        dist.recv(halo, neighbour)
    else:
        dist.recv(halo, neighbour)
        dist.send(edge, neighbour)
    return halo.mean().item()


def main():
    rank, device = join()
    neighbour = rank ^ 1
    field = torch.rand(64, 65_536, device=device)
    for step in range(300):
        field = (field + field.roll(1, 0) + field.roll(-1, 0)) / 3
        if step == 150 and rank == 0:
            print("fault", flush=True)
        mean = swap_halo(field, rank, neighbour, careful=step < 150)
        if step % 25 == 0 and rank == 0:
            print(f"step {step}: halo {mean:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
