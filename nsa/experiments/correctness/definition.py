"""The definition at a size that can be drawn: what each query of each branch sees, and why.

Everything is asked of `nsa.reference`; nothing is computed a second way but the counts in `facts`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.blocks import count_compressed, overlap
from nsa.config import NSAConfig
from nsa.experiments.correctness import probe
from nsa.reference.attend import attention_probs
from nsa.reference.compress import Phi, compress_keys
from nsa.reference.gate import sigmoid_gates
from nsa.reference.nsa import BRANCHES, compressed_visible, nsa, window_visible
from nsa.reference.select import importance, select, selected_tokens

HIDDEN = 32


@dataclass(frozen=True)
class Definition:
    """One call of the reference, of T tokens, HQ query heads and HKV groups, in fp64.

    sees: {branch: bool [HKV, T, T]}, which tokens a query gets anything from. p_cmp [HKV, G, T, C],
    importance [HKV, T, NB], blocks [HKV, T, n] with -1 for an empty slot, matrix [C, NB] of Eq. 9,
    gates [T, HQ, 3].
    """

    config: NSAConfig
    tokens: int
    sees: dict[str, Tensor]
    p_cmp: Tensor
    matrix: Tensor
    importance: Tensor
    blocks: Tensor
    gates: Tensor


def definition(tokens: int = probe.TOKENS, seed: int = 0, **sizes: int) -> Definition:
    """The reference on random queries and keys; `sizes` change those of the probe."""
    config = NSAConfig(**{**probe.SIZES, **sizes})
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    q = normal(1, tokens, probe.HEADS, probe.DIM)
    k, v = ({b: normal(1, tokens, probe.KV_HEADS, probe.DIM) for b in BRANCHES} for _ in "kv")
    hidden = normal(1, tokens, HIDDEN)
    weights = normal(HIDDEN, HIDDEN) / 4, normal(HIDDEN), normal(3 * probe.HEADS, HIDDEN) / 4
    gates = sigmoid_gates(hidden, *weights, normal(3 * probe.HEADS))
    result = nsa(q, k, v, gates, config)

    positions = torch.arange(tokens)
    k_cmp = compress_keys(k["cmp"], Phi(), config)
    visible = compressed_visible(positions, k_cmp.shape[1], config)
    p_cmp, _ = attention_probs(q, k_cmp, visible, probe.DIM**-0.5)
    scores = importance(p_cmp, config)
    # What is drawn is what the operation used.
    assert torch.equal(scores, result.importance)
    assert torch.equal(select(scores, config), result.blocks)
    causal = positions <= positions[:, None]
    groups = probe.KV_HEADS
    sees = {
        "cmp": _tokens_of(visible[0, 0], tokens, config).expand(groups, -1, -1),
        "slc": (selected_tokens(result.blocks, tokens, config) & causal)[0],
        "win": window_visible(positions, config)[0].expand(groups, -1, -1),
    }
    count = scores.shape[-1]
    matrix = [[overlap(i, j, config) for j in range(count)] for i in range(k_cmp.shape[1])]
    by_group = (x[0].transpose(0, 1) for x in (scores, result.blocks))
    matrix = torch.tensor(matrix).view(-1, count)
    return Definition(config, tokens, sees, p_cmp[0], matrix, *by_group, gates[0])


def _tokens_of(visible: Tensor, tokens: int, config: NSAConfig) -> Tensor:
    """[T, T]: the tokens under the compressed keys [T, C] that a query sees."""
    starts = torch.arange(visible.shape[1])[:, None] * config.compress_stride
    at = torch.arange(tokens)
    covers = (at >= starts) & (at < starts + config.compress_block)  # [C, T]
    return (visible.float() @ covers.float()) > 0


def facts(found: Definition) -> list[tuple[str, bool]]:
    """Sentences about the picture, each with whether it holds, counted from what the paper says."""
    config, tokens = found.config, found.tokens
    t = torch.arange(tokens)
    future = t[None, :] > t[:, None]
    blocks, own = found.blocks, t // config.select_block
    chosen = (blocks >= 0).sum(-1)
    due = (own + 1).clamp(max=config.select_count)
    per = config.select_block // config.compress_stride
    inner = min(found.matrix.shape[1] - 2, 1)
    column = [int(x) for x in found.matrix[:, inner] if x]
    seen_compressed = (found.p_cmp > 0).sum(-1)
    formula = torch.tensor([count_compressed(int(n) + 1, config) for n in t])
    legal = torch.arange(found.importance.shape[-1]) * config.select_block <= t[:, None]
    return [
        ("no query of any branch sees a later token",
         not any((mask & future).any() for mask in found.sees.values())),
        (f"a window holds min(t + 1, w = {config.window}) tokens",
         torch.equal(found.sees["win"][0].sum(-1), (t + 1).clamp(max=config.window))),
        (f"query t sees (t + 1 - l) // d + 1 compressed keys, none before t = l - 1 = "
         f"{config.compress_block - 1}", bool((seen_compressed == formula).all())),
        ("p_cmp adds up to 1 where a compressed key is seen and to 0 where none is",
         bool(torch.allclose(found.p_cmp.sum(-1), (formula > 0).to(found.p_cmp.dtype)))),
        (f"a block shares {column} strides with the compressed blocks that reach into it",
         len(column) == per + config.compress_block // config.compress_stride - 1),
        (f"every query selects min(n = {config.select_count}, blocks begun) blocks, each once",
         bool((chosen == due).all())),
        ("its own block is among them, and the first", all(
            bool((blocks == wanted).any(-1).all()) for wanted in (own[:, None], 0))),
        ("every query attends to its own token in the selected branch",
         bool(found.sees["slc"][:, t, t].all())),
        ("the free choices are the most important legal blocks", _best(found, legal)),
        ("gates are between 0 and 1, three for each query head",
         bool(((found.gates > 0) & (found.gates < 1)).all())),
    ]  # fmt: skip


def _best(found: Definition, legal: Tensor) -> bool:
    """No block that was left out is more important than one that was taken of its own accord."""
    config = found.config
    j = torch.arange(found.importance.shape[-1])
    own = torch.arange(found.tokens)[:, None] // config.select_block
    forced = (j < config.select_initial) | ((j > own - config.select_local) & (j <= own))
    taken = (found.blocks[..., None] == j).any(-2)
    free = found.importance.masked_fill(~(taken & ~forced), torch.inf).amin(-1)
    left = found.importance.masked_fill(taken | ~legal, -torch.inf).amax(-1)
    return bool((free >= left).all())
