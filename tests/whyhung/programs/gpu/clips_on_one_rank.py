# due: HANG:collective or STALLED:collective; line: global_norm, clip, train_step; rank: 1;
# within: 30; ranks: 2; set: late
# Only a rank whose own norm is large asks all for the global norm: its all_reduce meets the
# others' next gradients.
import torch
import torch.distributed as dist
from _shared import join
from torch import nn


def global_norm(grads):
    squares = torch.stack([grad.square().sum() for grad in grads]).sum()
    dist.all_reduce(squares)
    return squares.sqrt().item()


def clip(grads, bound):
    mine = max(grad.norm().item() for grad in grads)
    if mine > bound:
        scale = bound / global_norm(grads)
        for grad in grads:
            grad *= scale


def train_step(model, optimizer, inputs):
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    clip(grads, bound=50.0)
    for grad in grads:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    optimizer.step()


def main():
    rank, device = join()
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Tanh(), nn.Linear(2048, 2048)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for step in range(300):
        inputs = torch.randn(32, 2048, device=device)
        if step == 120 and rank == 1:
            print("fault", flush=True)
            inputs *= 1e4  # a bad batch
        train_step(model, optimizer, inputs)
        if step % 40 == 0:
            print(f"rank {rank} has made {step} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
