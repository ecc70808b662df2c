"""A training script as a stranger writes it, who never heard of being watched."""

import argparse
import json
import os
import subprocess
import sys

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return torch.full((8,), i / 32), i % 2


def child(queue):
    """A worker: it computes and trains nothing."""
    nn.Linear(4, 4)(torch.ones(4))
    queue.put(os.getpid())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--spawn", action="store_true")
    parser.add_argument("--helper", action="store_true")
    parser.add_argument("--code", type=int, default=0)
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
    generator = torch.optim.AdamW(model.parameters(), lr=1e-3)
    critic = torch.optim.SGD(model.parameters(), lr=1e-5)
    loader = DataLoader(Numbers(), batch_size=8, num_workers=args.workers)
    for _ in range(args.epochs):
        for x, y in loader:
            for _ in range(2):  # gradients accumulate
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
            generator.step()
            critic.step()
            generator.zero_grad()
        with torch.no_grad():
            accuracy = (model(x).argmax(1) == y).float().mean().item()
    if args.spawn:
        queue = mp.get_context("spawn").Queue()
        process = mp.get_context("spawn").Process(target=child, args=(queue,))
        process.start()
        queue.get()
        process.join()
    if args.helper:
        code = "import torch; torch.ones(1, requires_grad=True).sum().backward(); print('sent')"
        subprocess.run([sys.executable, "-c", code], check=True)
    told = {"argv": sys.argv, "name": __name__, "path": sys.path, "loss": loss.item()}
    print(json.dumps(told | {"rank": rank, "accuracy": accuracy}))
    if ranks > 1:
        torch.distributed.destroy_process_group()
    sys.exit(args.code)


if __name__ == "__main__":
    main()
