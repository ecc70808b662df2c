# due: HANG:lock or STALLED:lock or HANG:worker or HANG:fork;
# line: open_shard, __getitem__, train_epoch; rank: 1; within: 30; ranks: 2; set: first
# On rank 1 a thread holds the shard client's lock while DataLoader forks: its workers wait for
# ever, the other ranks in DDP.
import threading
import time

import torch
import torch.distributed as dist
from _shared import join
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class ShardClient:
    def __init__(self):
        self.lock = threading.Lock()
        self.sizes = {}

    def open_shard(self, number, seconds=0.0):
        with self.lock:
            time.sleep(seconds)
            return self.sizes.setdefault(number, 1000 + number)


class Samples(Dataset):
    def __init__(self, client):
        self.client = client

    def __len__(self):
        return 1600

    def __getitem__(self, i):
        size = self.client.open_shard(i // 100)
        return torch.full((512,), i / size)


def train_epoch(model, optimizer, loader, device):
    for batch in loader:
        batch = batch.to(device, non_blocking=True)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    rank, device = join()
    pins = device.type == "cuda"
    model = DistributedDataParallel(nn.Linear(512, 512).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    client = ShardClient()
    for epoch in range(4):
        if epoch == 1 and rank == 1:  # look at the next shard meanwhile
            threading.Thread(target=client.open_shard, args=(99, 3.0), daemon=True).start()
            time.sleep(0.3)
            print("fault", flush=True)
        loader = DataLoader(Samples(client), batch_size=40, num_workers=2, pin_memory=pins)
        loss = train_epoch(model, optimizer, loader, device)
        if rank == 0:
            print(f"epoch {epoch}: {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
