# due: STALLED:socket or HANG:socket; line: read_object, __getitem__, main; within: 60;
# runs: --bar no | --bar yes; set: first
# A DataLoader worker reads from an object store whose connection went silent, without a timeout;
# a progress bar ticks.
import socket
import sys
import threading
import time

import torch
from _shared import option
from torch.utils.data import DataLoader, Dataset


def answer(connection):
    while request := connection.recv(16):
        if int(request) == 700:
            print("fault", flush=True)
            time.sleep(3600)
        connection.sendall(b"%16d" % (int(request) % 9))


def serve(listener):
    while True:
        threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()


class Objects(Dataset):
    def __init__(self, address):
        self.address, self.connection = address, None

    def __len__(self):
        return 1200

    def read_object(self, i):
        self.connection = self.connection or socket.create_connection(self.address)
        self.connection.sendall(b"%16d" % i)
        return int(self.connection.recv(16))

    def __getitem__(self, i):
        return torch.full((4,), float(self.read_object(i)))


def draw_bar(start):
    while True:
        sys.stderr.write(f"\r{time.monotonic() - start:.0f} s")
        sum(i for i in range(10_000))
        time.sleep(0.1)


def main():
    if option("--bar", "no", "yes") == "yes":
        threading.Thread(target=draw_bar, args=(time.monotonic(),), daemon=True).start()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    model = torch.nn.Linear(4, 1)
    for batch in DataLoader(Objects(listener.getsockname()), batch_size=20, num_workers=2):
        model(batch).sum().backward()
    print("trained")


if __name__ == "__main__":
    main()
