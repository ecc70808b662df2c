# due: HANG:lock or HANG:fork or STALLED:lock; line: download, __getitem__, run_epoch; within: 60;
# set: first
# DataLoader forks while a thread holds the storage client's lock; its workers wait for a lock
# whose owner was not copied.
import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Storage:
    def __init__(self):
        self.session = threading.Lock()
        self.calls = 0

    def download(self, key, latency=0.0):
        with self.session:
            self.calls += 1
            time.sleep(latency)
            return torch.arange(32) * (key % 11) / 11.0


storage = Storage()


class Remote(Dataset):
    def __len__(self):
        return 3000

    def __getitem__(self, i):
        row = storage.download(i)
        return row, row.sum()


def run_epoch(model, optimizer):
    for rows, sums in DataLoader(Remote(), batch_size=60, num_workers=2):
        loss = (model(rows).squeeze(-1) - sums).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for epoch in range(4):
        if epoch == 1:  # the next epoch's first object is fetched ahead
            threading.Thread(target=storage.download, args=(0, 4.0), daemon=True).start()
            time.sleep(0.3)
            print("fault", flush=True)
        print(f"epoch {epoch}: {run_epoch(model, optimizer):.4f}", flush=True)


if __name__ == "__main__":
    main()
