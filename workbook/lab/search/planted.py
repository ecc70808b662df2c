"""Faults planted into one layer of a model on some ranks, and the parameters that must show them.

With each, training continues: no error, falling losses. Only gradient arrival reveals it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nsa.model.config import ModelConfig
from nsa.reference.nsa import BRANCHES
from nsa.spelling import choice

BRANCH = "win"  # the affected branch
STATE = {"rank branch": "missing", "detached": "missing", "gate x 0": "zero"}
FAULTS = tuple(STATE)


@dataclass(frozen=True)
class Planted:
    """Location of a fault: the parameters that must show it, their state, and the ranks."""

    parameters: tuple[str, ...]
    state: str  # "missing" or "zero"
    ranks: tuple[int, ...]


def planted(fault: str, config: ModelConfig, ranks: int) -> Planted:
    """Location of the fault made by `plant`: keys and values of the middle layer's window.

    "rank branch": the last rank executes another code branch than the others. "detached": every
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
    """Plant the fault in a LanguageModel on this rank, before any wrapper; see `planted`."""
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
    """Make the middle block's MLP add a sqrt of 0 masked by torch.where: the output is unchanged,
    but gradients are 0 / 0 = NaN."""

    def rooted(_module, _inputs, output: Tensor) -> Tensor:
        zero = output - output
        return output + torch.where(zero > 0, torch.sqrt(zero), 0.0)

    model.blocks[model.config.layers // 2].mlp.register_forward_hook(rooted)


def without_gradient(config: ModelConfig, names: Iterable[str]) -> set[str]:
    """Parameters of a LanguageModel that correctly get no gradient; see NSAAttention."""
    parts = []
    if config.force_branch or config.stopgrad_gates:
        parts += ["gate1.", "gate2."]
    if config.force_branch:
        others = [branch for branch in BRANCHES if branch != config.force_branch]
        parts += [f"{branch}." for branch in others]
    if config.force_branch in ("slc", "win"):
        parts += ["phi_key.", "phi_value."]
    return {name for name in names if any(f".attention.{part}" in name for part in parts)}
