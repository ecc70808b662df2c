"""GPUS: what programs ask of each GPU, and what it takes beyond tensors. Loads without torch."""

from dataclasses import dataclass

from nsa.spelling import nearest

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU queried by programs, and its memory use beyond tensors."""

    name: str
    capability: tuple[int, int]
    processors: int  # streaming multiprocessors
    total: int  # bytes, as in torch.cuda.get_device_properties
    resident: int  # bytes that cuBLAS takes from torch's allocator, once
    context: int  # bytes used by CUDA and its libraries outside torch's allocator
    measured: bool  # True if resident and context were measured on such a GPU


def _workspaces(capability: tuple[int, int]) -> int:
    """One cuBLAS workspace for the forward's thread and one for the backward's: in torch 32 MiB
    each for compute capability 9.0 and above, and 8.125 MiB below."""
    return 2 * (32 * MIB if capability >= (9, 0) else 8 * MIB + 128 * 1024)


def _gpu(name, capability, processors, gib, resident=None, context=None) -> Gpu:
    known = resident is not None
    held = resident if known else _workspaces(capability)
    taken = 512 * MIB if context is None else context
    return Gpu(name, capability, processors, int(gib * GIB), held, taken, known)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("NVIDIA H200", (9, 0), 132, 139.8, resident=65 * MIB, context=747 * MIB),
        _gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 79.1),
        _gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 79.2),
        _gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 39.4),
        _gpu("NVIDIA L40S", (8, 9), 142, 44.4),
        _gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 23.5),
        _gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 23.6),
    )
}


def gpu_named(name: str) -> Gpu:
    """Return the GPU of that name, or part of it ("H100"). ValueError names the known ones."""
    found = [gpu for known, gpu in GPUS.items() if name.lower() in known.lower()]
    if not found:
        hint = nearest(name, GPUS)
        raise ValueError(f"gpu={name!r} is none that is known; {hint}")
    return found[0]
