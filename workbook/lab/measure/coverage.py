"""Share of a trained model's dense attention that NSA's blocks would hold."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from nsa.blocks import count_selectable
from nsa.config import NSAConfig
from nsa.model.dense_attention import DenseAttention
from nsa.model.llama import LanguageModel
from nsa.reference.compress import Phi, compress_keys
from workbook.lab.measure.attention_inputs import importance_at, select_at
from workbook.lab.measure.selections import forward_seen

QUERIES = 192  # of a sequence's second half, evenly spaced


@torch.no_grad()
def coverage(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"],
    configs: Mapping[str, NSAConfig],
    precision: str = "fp32",
) -> list[dict[str, Any]]:
    """Compute what NSA's selected blocks would hold of each dense layer's attention.

    Returned by layer and name of a config: "far", the share of all attention that lies beyond the
    window; of that, "chosen", the share in the blocks that a group of heads selects by averaged
    keys (Eq. 8 to 11), and "best", the share in as many blocks that hold most of it, the forced
    ones among both. The model was not trained to be sparse: this is how much its attention would
    lose, not how well an NSA model would do.

    Raises ValueError for a model without dense attention.
    """
    layers = [m for m in model.modules() if isinstance(m, DenseAttention)]
    if not layers:
        raise ValueError("no layer of the model attends densely; attention='dense' does")
    found: list[dict[str, Any]] = []

    def look(layer: DenseAttention, args: tuple, kwargs: dict[str, Any]) -> None:
        q, k, _ = layer.queries_keys_values(*args, **kwargs)
        with torch.autocast(q.device.type, enabled=False):
            found.append(covered(q.float(), k.float(), configs))

    forward_seen(model, tokens, precision, layers, look)
    return found


def covered(
    q: Float[Tensor, "B T HQ D"], k: Float[Tensor, "B T HKV D"], configs: Mapping[str, NSAConfig]
) -> dict[str, dict[str, float]]:
    """Compute {config: {"far", "chosen", "best"}}, see `coverage`, for one layer's q and k."""
    tokens = k.shape[1]
    rows = torch.linspace(tokens // 2, tokens - 1, QUERIES, device=q.device).long().unique()
    mine, at = q[:, rows], torch.arange(tokens, device=q.device)
    scores = torch.einsum("brhgd,bthd->brhgt", mine.unflatten(2, (k.shape[2], -1)), k)
    later = at > rows[:, None, None, None]
    p = (scores * q.shape[3] ** -0.5).masked_fill(later, -torch.inf).softmax(-1).sum(3)
    made = {}
    for name, config in configs.items():
        beyond = at <= rows[:, None, None] - config.window
        far = p * beyond
        room = count_selectable(tokens, config) * config.select_block - tokens
        mass = F.pad(far, (0, room)).unflatten(-1, (-1, config.select_block)).sum(-1)
        importance = importance_at(mine, compress_keys(k, Phi(), config), rows, tokens, config)
        # The most massive blocks are those that a selection by their mass takes.
        sets = (select_at(x, rows, config) for x in (importance, mass))
        held = [mass.gather(-1, x.clamp(min=0).long()).masked_fill(x < 0, 0).sum() for x in sets]
        shares = [far.sum() / p.sum(), *(x / far.sum().clamp(min=1e-30) for x in held)]
        made[name] = dict(zip(("far", "chosen", "best"), map(float, shares), strict=True))
    return made
