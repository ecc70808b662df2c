# due: HANG:collective or STALLED:collective; line: tensor_then_data, data_then_tensor;
# rank: 0 or 1; within: 30; ranks: 2; set: first
# Rank 0 waits in the tensor group's all_reduce, the others in the data group's, each for the
# other (subgroups in another order).
import torch
import torch.distributed as dist
from _shared import join


def tensor_then_data(value, tensor_group, data_group):
    dist.all_reduce(value, group=tensor_group)
    scale = value.max().item()
    dist.all_reduce(value, group=data_group)
    return scale


def data_then_tensor(value, tensor_group, data_group):
    dist.all_reduce(value, group=data_group)
    scale = value.max().item()
    dist.all_reduce(value, group=tensor_group)
    return scale


def main():
    rank, device = join()
    everybody = list(range(dist.get_world_size()))
    tensor_group = dist.new_group(everybody)
    data_group = dist.new_group(everybody)
    value = torch.rand(4096, device=device)
    for step in range(300):
        for group in (tensor_group, data_group):
            dist.all_reduce(value, group=group)
            value = value / value.max()
        if step % 50 == 0 and rank == 0:
            print(f"step {step}: {value.mean().item():.4f}", flush=True)
        if step == 200:
            if rank == 0:
                print("fault", flush=True)
            clip = tensor_then_data if rank == 0 else data_then_tensor
            print(clip(value, tensor_group, data_group), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
