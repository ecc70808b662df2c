"""Healthy programs whose data, logs or metrics come through threads, workers and files."""

import gzip
import logging
import logging.handlers
import mmap
import multiprocessing
import pickle
import queue
import threading
import zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from nsa.experiments.selfcheck.programs import common
from nsa.experiments.selfcheck.programs.common import busy, pause, spend, training
from nsa.experiments.selfcheck.programs.registry import program


@program("healthy", at=2, forms=3, seconds=(12, 15))
def process_pool(form):
    """A validation in worker processes that compute (0), wait (1), or of which one is late (2)."""
    with ProcessPoolExecutor(2) if form == 1 else multiprocessing.Pool(2) as pool:
        if form == 2:
            list(pool.imap_unordered(pause, [0.1] * 20 + [15] + [0.1] * 20))
        else:
            list(pool.map((busy, pause)[form], [(5, 7)[form]] * 4))


@program("healthy", seconds=(14, 14))
def prefetch_slow_shard(form):
    """A thread reads shards ahead into a queue; the fourth comes late: sleeps (0), computes (1)."""
    shards = queue.Queue(2)
    threading.Thread(target=read_shards, args=(shards, form), daemon=True).start()
    for _, loss in training():
        shards.get()
        yield loss


def read_shards(shards, form):
    for k in range(6):
        if k == 3:
            (pause, busy)[form](14)
        shards.put(k)


class Images(Dataset):
    """Samples of which one takes long."""

    def __init__(self, slow, seconds, work):
        self.slow, self.seconds, self.work = slow, seconds, work

    def __len__(self):
        return 24

    def __getitem__(self, k):
        if k == self.slow:
            self.work(self.seconds)
        return torch.full((16,), k / 24), torch.zeros(1)


def from_loader(loader):
    model, opt, _ = common.tiny()
    return (common.train_step(model, opt, batch) for batch in loader)


@program("healthy", forms=3, seconds=(20, 25))
def loader_slow_first_batch(form):
    """20 s before the first batch: in this process (0), a forked worker (1), a spawned one (2)."""
    how = [{}, {"num_workers": 1}, {"num_workers": 1, "multiprocessing_context": "spawn"}][form]
    return from_loader(DataLoader(Images(0, 20, (busy, pause, busy)[form]), 4, **how))


@program("healthy", seconds=(14, 15))
def loader_slow_worker(form):
    """Two workers that stay; one sample in the middle waits for its storage (0) or computes (1)."""
    images = Images(14, 14, (pause, busy)[form])
    return from_loader(DataLoader(images, 4, num_workers=2, persistent_workers=True))


@program("healthy", at=2, seconds=(14, 14))
def thread_pool_futures(form):
    """Downloads in threads: as they come (0); resized in Python, in order (1)."""
    with ThreadPoolExecutor(3) as pool:
        if form == 1:
            list(pool.map(busy, [5, 4, 5]))
        else:
            sum(1 for _ in as_completed([pool.submit(pause, s) for s in (1, 14, 2)]))


@program("healthy", at=2, seconds=(14, 14))
def mapped_file(form):
    """Checksums over a file mapped into memory: by mmap (0), by numpy (1)."""
    path = common.scratch() / "tokens.bin"
    path.write_bytes(bytes(range(256)) * 2**15)
    if form == 1:
        tokens = np.memmap(path, dtype=np.uint16, mode="r")
        sum(np.bincount(tokens)[7] for _ in spend(14))
    else:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            sum(zlib.crc32(view[k % 2048 * 4096 :][:4096]) for k in spend(14))


@program("healthy", at=3, seconds=(14, 16))
def compressed_shards(form):
    """Shards are unpacked before step 3: numpy's (0), pickles in gzip (1)."""
    path, tokens = common.scratch() / "shard.npz", np.arange(common.sized(2e6) + 100) % 977
    np.savez_compressed(path, tokens=tokens)
    packed = gzip.compress(pickle.dumps(tokens.tolist()), 1)
    for _ in spend(14):
        pickle.loads(gzip.decompress(packed)) if form else np.load(path)["tokens"]


@program("healthy", seconds=(14, 16))
def writer_process(form):
    """A process writes events: its queue is full for 14 s (0), or it is late at the end (1)."""
    events = multiprocessing.Queue(1 if form == 0 else 0)
    writer = multiprocessing.Process(target=write_events, args=(events, form))
    writer.start()
    for i, loss in training():
        events.put((i, loss))
        if i == 5:
            events.put(None)
            writer.join()
        yield loss


def write_events(events, form):
    for k, (_, loss) in enumerate(iter(events.get, None)):
        pause(14 if k == (2 if form == 0 else 5) else 0)
        round(loss, 3)


class SlowHandler(logging.Handler):
    def emit(self, record):
        pause(14 if "step 3" in record.getMessage() else 0)


@program("healthy", seconds=(14, 14))
def logging_thread(form):
    """A listener writes the log; the end of training waits for it: by stop (0), by a join (1)."""
    records = queue.Queue()
    listener = logging.handlers.QueueListener(records, SlowHandler())
    listener.start()
    log = logging.Logger("training")
    log.addHandler(logging.handlers.QueueHandler(records))
    for i, loss in training():
        log.info("step %d loss %.4f", i, loss)
        if i == 5 and form == 1:
            records.join()
        if i == 5:
            listener.stop()
        yield loss


@program("healthy", seconds=(15, 15))
def monitor_thread(form):
    """A progress bar's thread wakes now and then while main computes (0) or waits (1)."""
    done = threading.Event()

    def monitor():
        while not done.wait(max(10 * common.SCALE, 0.01)):
            pass

    threading.Thread(target=monitor, daemon=True).start()
    for i, loss in training():
        if i == 3:
            (busy, pause)[form](15)
        yield loss
    done.set()
