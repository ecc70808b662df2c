# due: healthy; quiet: 45; ranks: 2; runs: --server thread | --server process; set: first
# Rank 0 uploads its checkpoint to a slow HTTP server (about 200 kB a second); the others wait.
import http.client
import http.server
import multiprocessing
import os
import threading
import time

import torch
import torch.distributed as dist
from _shared import SCALE, join, option

RATE = 200_000


class SlowStore(http.server.BaseHTTPRequestHandler):
    def do_PUT(self):
        left = int(self.headers["Content-Length"])
        while left:
            left -= len(self.rfile.read(min(left, RATE // 10)))
            time.sleep(0.1)
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


def serve(server):
    server.serve_forever()


def start_store(kind):
    server = http.server.HTTPServer(("127.0.0.1", 0), SlowStore)
    if kind == "thread":
        threading.Thread(target=serve, args=(server,), daemon=True).start()
    else:
        multiprocessing.get_context("fork").Process(
            target=serve, args=(server,), daemon=True
        ).start()
    return server.server_address


def upload(address):
    print("quiet", flush=True)
    body = os.urandom(int(45 * RATE * SCALE))
    connection = http.client.HTTPConnection(*address, timeout=600)
    connection.request("PUT", "/checkpoint.pt", body)
    status = connection.getresponse().status
    print("over", flush=True)
    return status


def main():
    server = option("--server", "thread", "process")
    address = start_store(server) if os.environ["RANK"] == "0" else None
    rank, device = join()
    weight = torch.randn(512, 512, device=device)
    for step in range(40):
        dist.all_reduce(weight)
        weight = torch.tanh(weight)
        if step == 20:
            if rank == 0:
                print("status", upload(address), flush=True)
            dist.barrier()
    print(f"rank {rank}: {weight.mean().item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
