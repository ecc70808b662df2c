"""What a notebook's cells run on."""

from dataclasses import dataclass

import torch

from nsa.spelling import choice

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Machine:
    """Where a notebook's cells run."""

    where: str  # "cpu" or "cuda"
    name: str  # what figures call it

    def __str__(self) -> str:
        return f"{self.name}, torch {torch.__version__}"

    @property
    def on_cpu(self) -> bool:
        return self.where == "cpu"

    @property
    def threads(self) -> int | None:
        """Of each child: one on a CPU, where several run beside each other; None: torch's own."""
        return 1 if self.on_cpu else None

    @property
    def note(self) -> str:
        """What a figure of times says of the machine."""
        return f"{self.name}: only ratios mean anything" if self.on_cpu else self.name


def find_machine(device: str, gpus: int = 1) -> Machine:
    """The machine for a notebook's parameter `device`; "auto" is a GPU where torch finds so many.

    Raises ValueError for another word, and for "cuda" without so many.
    """
    choice("device", device, DEVICES)
    found = torch.cuda.device_count()
    if device == "cuda" and found < gpus:
        wanted, there = ("a GPU" if gpus == 1 else f"{gpus} GPUs"), found or "none"
        raise ValueError(
            f"device='cuda' needs {wanted} and torch {torch.__version__} finds {there}; "
            "device='cpu' would do, or 'auto', which takes what there is"
        )
    if device == "cpu" or found < gpus:
        return Machine("cpu", "a CPU")
    return Machine("cuda", torch.cuda.get_device_name())
