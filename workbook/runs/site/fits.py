"""Answer to "does it fit my GPU?": estimated peaks of models from 0.13B to 8.6B.

The estimates take minutes, so they are stored in fits.json; `python -m workbook.runs.site.fits`
writes them anew.
"""

import json
from pathlib import Path
from typing import Any

from workbook.runs.files import read_json, write_atomically
from workbook.runs.looks import length

FILE = Path(__file__).with_name("fits.json")
GIB = 2**30
USUAL_GIB = 80.0  # of an H100 or A100
TOKENS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
GPU = "NVIDIA H200"  # the calibrated one
# Settings of `nsa estimate`, by number of parameters. From 1.6B on they are the widths of Llama 3's
# 1B, 3B and 8B, with keys and values of three branches, and embeddings that are not tied.
SIZES = {
    "0.13B": "layers=12 dim=768 heads=12 kv_heads=2 head_dim=64 vocab=32000",
    "0.36B": "layers=24 dim=1024 heads=16 kv_heads=4 head_dim=64 vocab=32000",
    "1.6B": "layers=16 dim=2048 heads=32 kv_heads=8 head_dim=64 mlp_hidden=8192 vocab=128256",
    "4.0B": "layers=28 dim=3072 heads=24 kv_heads=8 head_dim=128 mlp_hidden=8192 vocab=128256",
    "8.6B": "layers=32 dim=4096 heads=32 kv_heads=8 head_dim=128 mlp_hidden=14336 vocab=128256",
}
WAYS = {"layers kept": "", "layers recomputed": "checkpoint=all"}
ASKED = ("1.6B", "layers kept", 8192)  # cell of the front page's sentence


def command(size: str, way: str, tokens: int, more: str = "") -> str:
    """Command line that estimates a cell."""
    return " ".join(filter(None, ("nsa estimate", SIZES[size], WAYS[way], f"tokens={tokens}",
                                  "precision=bf16", more)))  # fmt: skip


def cell(size: str, way: str, tokens: int) -> dict[str, Any]:
    """Estimate one cell: number of parameters; bytes at the peak of a step of one sequence, those
    allocated and those needed, which are reserved or CUDA's own."""
    import torch

    from nsa.model.llama import LanguageModel
    from nsa.spelling import settings
    from workbook.lab.estimate.estimate import estimate
    from workbook.lab.estimate.gpus import gpu_named
    from workbook.lab.training import TrainingSpec

    changes = settings([*SIZES[size].split(), *WAYS[way].split()], "tokens=2048")
    own = {name: changes.pop(name) for name in ("layers", "checkpoint") if name in changes}
    own |= {"precision": "bf16", "device": "cuda", "changes": changes}
    spec = TrainingSpec("production", tokens, **own)
    found, context = estimate(spec, gpu=GPU), gpu_named(GPU).context
    with torch.device("meta"):
        parameters = sum(p.numel() for p in LanguageModel(spec.config()).parameters())
    at = {"size": size, "way": way, "tokens": tokens, "parameters": parameters}
    return at | {"allocated": found.allocated + context, "needs": found.reserved + context}


def table(gib: float = USUAL_GIB) -> dict[str, Any]:
    """Content of FILE: day, torch and commit of the estimates, and rows of cells by size and way,
    each with the longest of TOKENS that surely fits `gib`."""
    stored = read_json(FILE)
    rows = []
    for size in SIZES:
        for way in WAYS:
            cells = [c for c in stored["cells"] if (c["size"], c["way"]) == (size, way)]
            for one in cells:
                one["gib"], one["least"] = one["needs"] / GIB, one["allocated"] / GIB
                one["text"] = f"{one['gib']:.1f}" if one["gib"] < 100 else f"{one['gib']:.0f}"
                one["command"] = command(size, way, one["tokens"])
            fit = [one["tokens"] for one in cells if one["gib"] <= gib]
            largest = length(max(fit)) if fit else "none"
            rows.append({"size": size, "way": way, "cells": cells, "largest": largest})
    about = {name: stored[name] for name in ("date", "torch", "commit")}
    return about | {"gpu": GPU, "tokens": TOKENS, "gib": gib, "rows": rows}


def answer(gib: float = USUAL_GIB) -> dict[str, Any]:
    """Sentence of the front page on the model ASKED, and the whole table."""
    found = table(gib)
    rows = {(row["size"], row["way"]): row for row in found["rows"]}
    size, way, tokens = ASKED
    one = next(c for c in rows[size, way]["cells"] if c["tokens"] == tokens)
    fits = "fits" if one["gib"] <= gib else "does not fit"
    return found | {"size": size, "asked": one, "fits": fits}


def write() -> None:
    """Estimate all cells and write FILE."""
    from workbook.runs import environment

    facts = environment.provenance(environment.snapshot()) | {"date": environment.utc_now()[:10]}
    cells = [cell(size, way, tokens) for size in SIZES for way in WAYS for tokens in TOKENS]
    lines = ",\n".join(json.dumps(one) for one in cells)
    about = json.dumps({name: facts[name] for name in ("date", "torch", "commit")})
    write_atomically(FILE, f'{about[:-1]}, "cells": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    write()
