# due: healthy; quiet: 45; ranks: 2; runs: --by file | --by key; set: late
# Rank 0 downloads weights for 45 s; the others ask for the file each second, or wait for a key of
# the store.
import datetime
import os
import socket
import threading
import time

import torch
import torch.distributed as dist
from _shared import SCALE, join, option


def serve(listener, seconds):
    connection, _ = listener.accept()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(bytes(30_000))
        time.sleep(0.15)
    connection.close()


def download(path):
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener, 45 * SCALE), daemon=True).start()
    print("quiet", flush=True)
    with socket.create_connection(listener.getsockname()) as connection, open("part", "wb") as part:
        while data := connection.recv(65536):
            part.write(data)
    os.replace("part", path)
    print("over", flush=True)


def wait(path, by, store):
    if by == "key":
        store.wait(["weights"], datetime.timedelta(minutes=20))
    while not os.path.exists(path):
        time.sleep(1)


def main():
    by = option("--by", "file", "key")
    rank, device = join()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        download("weights.bin")
        store.set("weights", "there")
    else:
        wait("weights.bin", by, store)
    weights = torch.full((256,), float(os.path.getsize("weights.bin")), device=device)
    dist.all_reduce(weights)
    print(f"rank {rank}: {weights[0].item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
