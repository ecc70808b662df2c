# due: HANG or STALLED; line: augment, main; within: 60; set: first
# The parent has used OpenMP threads; a forked child's first parallel product waits for threads
# that fork did not copy.
import multiprocessing

import torch

torch.set_num_threads(2)


def augment(size):
    images = torch.rand(size, size)
    return (images @ images).sum().item()


def main():
    print(augment(1500), flush=True)
    torch.rand(2000, 2000).exp().sum()
    print("fault", flush=True)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(augment, [1500] * 4), flush=True)


if __name__ == "__main__":
    main()
