# due: healthy; quiet: 45; ranks: 2; runs: --pause one | --pause growing; set: first
# Rank 0's request is refused (429), so it backs off for 45 s and asks again; the others wait in
# broadcast_object_list.
import time

import torch
import torch.distributed as dist
from _shared import SCALE, join, option


def ask_hub(attempts):
    if attempts == 0:
        raise ConnectionError("429: too many requests")
    return {"revision": "main", "shards": list(range(8))}


def fetch_manifest(pauses):
    print("quiet", flush=True)
    for pause in pauses:
        try:
            return ask_hub(attempts=0)
        except ConnectionError:
            time.sleep(pause * SCALE)
    print("over", flush=True)
    return ask_hub(attempts=1)


def main():
    pause = option("--pause", "one", "growing")
    rank, device = join()
    scale = torch.ones(256, device=device)
    for step in range(40):
        dist.all_reduce(scale)
        scale /= dist.get_world_size()
        if step == 20:
            pauses = [45] if pause == "one" else [1, 2, 4, 8, 30]
            manifest = [fetch_manifest(pauses) if rank == 0 else None]
            dist.broadcast_object_list(manifest, src=0)
    print(f"rank {rank}: {len(manifest[0]['shards'])} shards, {scale.sum().item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
