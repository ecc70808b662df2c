"""Inputs of the kernels' tests: flat axes of one sequence or several."""

from itertools import pairwise

import torch
from backend_calls import DEVICE

from nsa.kernels.sequences import Sequences, dense, packed
from nsa.reference.attend import attend
from nsa.reference.compress import compress

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)


def sequences_of(lengths, config) -> Sequences:
    """Sequences of the given lengths, packed unless all have the same."""
    if len(set(lengths)) == 1:
        return dense(len(lengths), lengths[0], config)
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    return packed(bounds, sum(lengths), config)


def rows_of(lengths) -> list[slice]:
    """Rows of each sequence when they are laid end to end."""
    return [slice(a, b) for a, b in pairwise([0, *torch.tensor(lengths).cumsum(0).tolist()])]


def attended(q, k, v, lengths, key_lengths, visible, scale):
    """The reference's (o, lse), sequence by sequence; visible(number, rows) is its [1, *, T, S]."""
    parts, of = [], zip(rows_of(lengths), rows_of(key_lengths), strict=True)
    for number, (rows, keys) in enumerate(of):
        if rows.start < rows.stop:
            mask = visible(number, rows)
            parts.append(attend(q[None, rows], k[None, keys], v[None, keys], mask, scale))
    return [torch.cat([part[i][0] for part in parts]) for i in range(2)]


def means(x, lengths, config):
    """The reference's means of the blocks of each sequence, end to end."""
    parts = [compress(x[None, rows], "mean", None, config)[0] for rows in rows_of(lengths)]
    return torch.cat(parts)
