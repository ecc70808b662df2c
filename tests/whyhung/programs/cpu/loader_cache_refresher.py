# due: HANG:lock or HANG:fork or STALLED:lock; line: decoded, __getitem__, main; within: 60;
# runs: --refresh 0.01 | --refresh 0.1; set: first
# As loader_client_lock, and the thread that held the lock lives on: it refreshes the cache at
# about 1 % of a core.
import threading
import time

import numpy as np
import torch
from _shared import option
from torch.utils.data import DataLoader, Dataset


class Decoded:
    """Keeps decoded clips; a thread decodes them anew, with the lock, one by one."""

    def __init__(self, pause):
        self.lock, self.pause, self.clips = threading.Lock(), pause, {}
        threading.Thread(target=self.refresh, daemon=True).start()

    def refresh(self):
        generator = np.random.default_rng(1)
        while True:
            with self.lock:
                for i in range(200):
                    self.clips[i] = generator.random(512, dtype=np.float32)
                    time.sleep(self.pause)
            time.sleep(self.pause / 10)

    def decoded(self, i):
        with self.lock:
            return self.clips.setdefault(i, np.full(512, i, np.float32))


class Clips(Dataset):
    def __init__(self, cache):
        self.cache = cache

    def __len__(self):
        return 1500

    def __getitem__(self, i):
        return torch.from_numpy(self.cache.decoded(i))


def main():
    cache = Decoded(option("--refresh", 0.01))
    model = torch.nn.Linear(512, 8)
    time.sleep(0.5)
    print("fault", flush=True)
    for epoch in range(3):
        for clips in DataLoader(Clips(cache), batch_size=50, num_workers=2, shuffle=True):
            model(clips).square().mean().backward()
        print(f"epoch {epoch} done", flush=True)


if __name__ == "__main__":
    main()
