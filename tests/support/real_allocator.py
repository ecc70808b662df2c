"""Random allocations, and what torch's own allocator has after each: run as a program, with the
events on stdin and the answer on stdout."""

import json
import random
import sys
from contextlib import nullcontext

MIB = 2**20
AGAIN = (512, 4096, 300_000, MIB, 3 * MIB // 2, 3 * MIB, 9 * MIB, 20 * MIB, 33 * MIB)  # for ties
LARGEST = 200 * MIB


def random_events(seed: int, count: int, most: int, pools: int) -> list[list]:
    """[what, name, bytes, stream, pool] each, what one of alloc, free, empty; at most about `most`
    bytes at a time, so that a smaller limit is met now and then."""
    rng = random.Random(seed)
    events, live = [], {}
    for name in range(count):
        if rng.random() < 0.02:
            events.append(["empty", 0, 0, 0, 0])
        elif live and (rng.random() < 0.35 or sum(live.values()) > most):
            gone = rng.choice(list(live))
            del live[gone]
            events.append(["free", gone, 0, 0, 0])
        else:
            size = rng.choice(AGAIN) if rng.random() < 0.5 else int(LARGEST ** rng.random())
            live[name] = size
            pool = rng.randrange(1, pools + 1) if pools and rng.random() < 0.2 else 0
            events.append(["alloc", name, size, int(rng.random() < 0.2), pool])
    return events


def main() -> None:
    import torch

    asked = json.load(sys.stdin)
    total = torch.cuda.get_device_properties(0).total_memory
    if asked["limit"]:
        torch.cuda.set_per_process_memory_fraction(asked["limit"] / total)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    pools = [None, *(torch.cuda.MemPool() for _ in range(asked["pools"]))]
    held, rows = {}, []
    for what, name, size, stream, pool in asked["events"]:
        address = None
        if what == "alloc":
            inside = torch.cuda.use_mem_pool(pools[pool]) if pool else nullcontext()
            try:
                with torch.cuda.stream(streams[stream]), inside:
                    held[name] = torch.empty(size, dtype=torch.uint8, device="cuda")
                address = held[name].data_ptr()
            except torch.OutOfMemoryError:
                pass
        elif what == "free":
            held.pop(name, None)
        else:
            torch.cuda.empty_cache()
        rows.append([address, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
    print(json.dumps({"rows": rows, "total": total, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
