"""A program that tells all of itself that somebody who watches could change, and ends badly."""

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

OURS = (  # variables that lead the programs below to whoever watches
    "PYTHONPATH", "NSA_WATCH_FOLDER", "NSA_WATCH_ABOVE", "NSA_FAMILY_COOKIE",
    "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_TIMING",
)  # fmt: skip


class Fails(nn.Module):
    def forward(self, x):
        if x.shape[0] == 5:
            warnings.warn("five rows", stacklevel=1)
            raise ValueError("five rows")
        return x


def told(what, value):
    print(f"{what}: {value}", flush=True)


def itself():
    told("signals", {n: str(signal.getsignal(n)) for n in sorted(signal.valid_signals())})
    told("blocked", signal.pthread_sigmask(signal.SIG_BLOCK, []))
    told("threads", [one.name for one in threading.enumerate()])
    hooks = "excepthook", "unraisablehook", "breakpointhook"
    told("hooks", [getattr(sys, name) is getattr(sys, f"__{name}__") for name in hooks])
    told("hook of threads", threading.excepthook is threading.__excepthook__)
    told("traced", [sys.gettrace(), sys.getprofile()])
    if sys.version_info >= (3, 12):
        told("monitoring", [sys.monitoring.get_tool(number) for number in range(6)])
    told("finders", [str(one) for one in sys.meta_path if "object at" not in str(one)])
    told("finders", len(sys.meta_path))
    told("sites", [one for one in sys.path if "hook" in one])
    told("interpreter", [sys.flags, sys.getswitchinterval(), gc.get_threshold(), sys.argv])
    told("variables", sorted(set(os.environ) - set(OURS)))
    told("names", [torch.autograd.backward.__qualname__, nn.Module.__call__.__qualname__])
    told("faults", faulthandler.is_enabled())


def works():
    """Modules, backwards, steps, a loader's workers, a progress bar."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Fails(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4, num_workers=1)
    for (x,) in tqdm(loader, bar_format="{n_fmt} of {total_fmt}|{bar:10}|", mininterval=0):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    told("loss", loss.item())
    return model


def forks():
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        nn.Linear(2, 2)(torch.ones(2)).sum().backward()
        told("child", [signal.getsignal(signal.SIGTERM), threading.active_count()])
        sys.exit(3)
    told("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    command = [sys.executable, "-c", "import sys; print(sys.argv); sys.exit(4)", "an argument"]
    told("started", subprocess.run(command, check=False).returncode)


def waits_for_signals():
    """Blocked in the main thread alone: a thread of somebody else's must not take it instead."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGUSR2)
    told("got", signal.sigwait([signal.SIGUSR2]))


def debugged():
    number = 1
    breakpoint()  # its commands come from stdin
    told("number", number)


def main():
    itself()
    waits_for_signals()
    model = works()
    forks()
    debugged()
    faulthandler.dump_traceback(all_threads=False)
    itself()
    model(torch.ones(5, 8))


if __name__ == "__main__":
    main()
