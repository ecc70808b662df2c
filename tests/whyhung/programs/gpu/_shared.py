"""Process group of these programs, scale of their quiet times, and reading of their option."""

import argparse
import os

import torch
import torch.distributed as dist

SCALE = float(os.environ.get("HANGS_SCALE", 1))  # of the quiet times


def option(name, *values):
    """Value given for an option, "--by": one of several texts, or any number; else the first."""
    parser = argparse.ArgumentParser()
    choices = values if len(values) > 1 else None
    parser.add_argument(
        name, dest="value", type=type(values[0]), choices=choices, default=values[0]
    )
    return parser.parse_args().value


def join(**options):
    """Join the process group, by NCCL or, without a GPU, by gloo; return (rank, its device)."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo", **options)
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    return rank, device
