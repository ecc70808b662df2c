"""What a notebook's cells run on."""

import torch

DEVICES = ("auto", "cpu", "cuda")


def find_machine(device: str, gpus: int = 1) -> tuple[str, str]:
    """("cuda" or "cpu", what figures call it) for a notebook's parameter `device`.

    "auto" is "cuda" where torch finds that many GPUs.

    Raises ValueError for another word, and for "cuda" without so many.
    """
    if device not in DEVICES:
        raise ValueError(f"device={device!r} is unknown; known are {', '.join(DEVICES)}")
    found = torch.cuda.device_count()
    if device == "cuda" and found < gpus:
        wanted, there = ("a GPU" if gpus == 1 else f"{gpus} GPUs"), found or "none"
        raise ValueError(
            f"device='cuda' needs {wanted} and torch {torch.__version__} finds {there}; "
            "device='cpu' would do, or 'auto', which takes what there is"
        )
    if device == "cpu" or found < gpus:
        return "cpu", "a CPU"
    return "cuda", torch.cuda.get_device_name()
