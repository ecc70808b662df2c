# due: HANG:collective or STALLED:collective; line: average, gather_losses; rank: 1; within: 30;
# ranks: 2; set: late
# Rank 1 runs out of memory in one batch, catches that and goes on with the next: its collectives
# are one batch behind.
import torch
import torch.distributed as dist
from _shared import join
from torch import nn


def attention_loss(model, tokens):
    x = model(tokens)
    scores = torch.softmax(x @ x.T / 32, -1)
    return (scores @ x).square().mean()


def average(model):
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat)
    return flat.norm().item()


def gather_losses(loss):
    every = torch.empty(dist.get_world_size(), device=loss.device)
    dist.all_gather_into_tensor(every, loss.detach().reshape(1))
    return every.mean().item()


def train_batch(model, optimizer, length, device):
    optimizer.zero_grad()
    try:
        loss = attention_loss(model, torch.randn(length, 1024, device=device))
        loss.backward()
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        print("fault", flush=True)
        print(f"skipped {length} tokens: {str(error)[:40]}", flush=True)
        return None
    average(model)
    optimizer.step()
    return gather_losses(loss)


def main():
    rank, device = join()
    model = nn.Linear(1024, 2048).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(60):
        length = 250_000 if step == 40 and rank == 1 else 256
        loss = train_batch(model, optimizer, length, device)
        if step % 10 == 0 and rank == 0:
            print(f"step {step}: {loss}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
