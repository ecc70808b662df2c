"""torchtitan on a CPU: to be imported before any other part of it.

It takes "cuda" where it finds no accelerator. Its names for the device are set to the CPU, with
what torch.cpu has not; all else is torchtitan's own.
"""

from types import SimpleNamespace

import torch
from torchtitan.tools import utils

OF_A_CPU = {
    "get_device_name": lambda *_: "CPU",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=2**30),
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda: None,
    "current_device": lambda: 0,
}
names = {name: getattr(torch.cpu, name) for name in dir(torch.cpu)}
utils.device_type, utils.device_module = "cpu", SimpleNamespace(**names | OF_A_CPU)
if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3 wants a newer torch than 2.13
    torch.distributed.set_timeout = lambda *_: None
