"""Faults planted into one layer of a model on some ranks, and which parameters must show them.

Each lets training go on: no error is raised, losses fall. Only the arrival of gradients tells.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nsa.model.config import ModelConfig
from nsa.reference.nsa import BRANCHES
from nsa.spelling import choice

BRANCH = "win"  # the branch that they spoil
STATE = {"rank branch": "missing", "detached": "missing", "gate x 0": "zero"}
FAULTS = tuple(STATE)


@dataclass(frozen=True)
class Planted:
    """Where a fault is: the parameters that must show it, in which state, and on which ranks."""

    parameters: tuple[str, ...]
    state: str  # "missing" or "zero"
    ranks: tuple[int, ...]


def planted(fault: str, config: ModelConfig, ranks: int) -> Planted:
    """What `plant` spoils: keys and values of the window in the middle layer.

    "rank branch": the last rank takes another branch of the code than the others. "detached": every
    rank computes it without a graph. "gate x 0": its gate is multiplied by zero on every rank.

    Raises ValueError for an unknown fault, and for a rank branch with one rank only.
    """
    choice("fault", fault, FAULTS)
    if fault == "rank branch" and ranks < 2:
        raise ValueError(f"a rank branch needs at least 2 ranks, got {ranks}")
    layer = config.layers // 2
    kinds = ("k_proj", "v_proj")
    names = tuple(f"blocks.{layer}.attention.{BRANCH}.{kind}.weight" for kind in kinds)
    where = (ranks - 1,) if fault == "rank branch" else tuple(range(ranks))
    return Planted(names, STATE[fault], where)


def plant(fault: str, model: nn.Module, rank: int, ranks: int) -> None:
    """Spoils a LanguageModel on this rank, before anything wraps it; see `planted`."""
    where = planted(fault, model.config, ranks)
    if rank not in where.ranks:
        return
    if fault == "gate x 0":
        attention = model.blocks[model.config.layers // 2].attention
        gates = attention.gates

        def spoilt(x: Tensor, q: Tensor) -> Tensor:
            g = gates(x, q)
            return g * g.new_tensor([float(branch != BRANCH) for branch in BRANCHES])

        attention.gates = spoilt
        return
    for name in where.parameters:
        model.get_submodule(name.removesuffix(".weight")).register_forward_hook(
            lambda _module, _inputs, output: output.detach()
        )


def plant_root(model: nn.Module) -> None:
    """The middle block's MLP adds a root of 0 that torch.where leaves out: right, but for gradients
    that are 0 / 0 = NaN."""

    def rooted(_module, _inputs, output: Tensor) -> Tensor:
        zero = output - output
        return output + torch.where(zero > 0, torch.sqrt(zero), 0.0)

    model.blocks[model.config.layers // 2].mlp.register_forward_hook(rooted)


def without_gradient(config: ModelConfig, names: Iterable[str]) -> set[str]:
    """Those of a LanguageModel's parameters that rightly have none; see NSAAttention."""
    parts = []
    if config.force_branch or config.stopgrad_gates:
        parts += ["gate1.", "gate2."]
    if config.force_branch:
        others = [branch for branch in BRANCHES if branch != config.force_branch]
        parts += [f"{branch}." for branch in others]
    if config.force_branch in ("slc", "win"):
        parts += ["phi_key.", "phi_value."]
    return {name for name in names if any(f".attention.{part}" in name for part in parts)}
