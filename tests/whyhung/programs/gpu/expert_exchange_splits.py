# due: HANG:collective or STALLED:collective or STALLED:device; line: exchange_tokens, layer;
# rank: 0 or 1; within: 30; ranks: 2; set: first
# Rank 1 expects more tokens from rank 0 than that one sends: all_to_all_single with splits that
# do not agree (MoE dispatch).
import torch
import torch.distributed as dist
from _shared import join


def exchange_tokens(tokens, sends, receives):
    out = tokens.new_empty(sum(receives), tokens.shape[1])
    dist.all_to_all_single(out, tokens, receives, sends)
    return out


def layer(tokens, capacity, expected):
    size = dist.get_world_size()
    sends = [capacity] * size
    routed = exchange_tokens(tokens[: sum(sends)], sends, expected)
    return torch.tanh(routed).sum().item()


def main():
    (rank, device), size = join(), dist.get_world_size()
    tokens = torch.randn(2000 * size, 1024, device=device)
    for step in range(200):
        expected = [2000] * size
        if step == 60 and rank == 1:
            print("fault", flush=True)
            expected[0] = 40_000  # its capacity factor was changed, the other rank's was not
        total = layer(tokens, 2000, expected)
        if step % 20 == 0 and rank == 0:
            print(f"step {step}: {total:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
