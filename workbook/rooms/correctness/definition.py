"""Definition at a drawable size: the tokens that each query of each branch attends to, and why.

Everything comes from `nsa.reference`; only the counts in `facts` are computed independently.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.blocks import count_compressed, overlap
from nsa.config import NSAConfig
from nsa.reference.attend import attention_probs
from nsa.reference.compress import Phi, compress_keys
from nsa.reference.gate import sigmoid_gates
from nsa.reference.nsa import BRANCHES, compressed_visible, nsa, window_visible
from nsa.reference.select import importance, select, selected_tokens
from workbook.rooms.correctness import probe

HIDDEN = 32


@dataclass(frozen=True)
class Definition:
    """Result of one call of the reference with T tokens, HQ query heads and HKV groups, in fp64.

    sees: {branch: bool [HKV, T, T]}, tokens that contribute to a query. p_cmp [HKV, G, T, C],
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
    """Run the reference on random queries and keys; `sizes` override those of the probe."""
    config = NSAConfig(**{**probe.SIZES, **sizes})
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    q = normal(1, tokens, probe.HEADS, probe.DIM)
    k, v = ({b: normal(1, tokens, probe.KV_HEADS, probe.DIM) for b in BRANCHES} for _ in "kv")
    hidden = normal(1, tokens, HIDDEN)
    first = normal(HIDDEN, HIDDEN) / 4, normal(HIDDEN)
    last = normal(3 * probe.HEADS, HIDDEN) / 4, normal(3 * probe.HEADS)
    gates = sigmoid_gates(hidden, *(lambda x, w=w: F.linear(x, *w) for w in (first, last)))
    result = nsa(q, k, v, gates, config)

    t = torch.arange(tokens)
    k_cmp = compress_keys(k["cmp"], Phi(), config)
    compressed = range(k_cmp.shape[1])
    visible = compressed_visible(t, len(compressed), config)
    p_cmp, _ = attention_probs(q, k_cmp, visible, probe.DIM**-0.5)
    scores = importance(p_cmp, config)
    # The drawn tensors are those that the operation used.
    assert torch.equal(scores, result.importance)
    assert torch.equal(select(scores, config), result.blocks)
    starts = torch.arange(len(compressed))[:, None] * config.compress_stride
    covers = (t >= starts) & (t < starts + config.compress_block)  # [C, T]
    through_compressed = visible[0, 0].float() @ covers.float() > 0
    sees = {
        "cmp": through_compressed.expand(probe.KV_HEADS, -1, -1),
        "slc": (selected_tokens(result.blocks, tokens, config) & (t <= t[:, None]))[0],
        "win": window_visible(t, config)[0].expand(probe.KV_HEADS, -1, -1),
    }
    count = scores.shape[-1]
    matrix = torch.tensor([[overlap(i, j, config) for j in range(count)] for i in compressed])
    by_group = (x[0].transpose(0, 1) for x in (scores, result.blocks))
    return Definition(config, tokens, sees, p_cmp[0], matrix.view(-1, count), *by_group, gates[0])


def facts(found: Definition) -> list[tuple[str, bool]]:
    """Statements about the picture, each with its truth value, counted by the paper's formulas."""
    config, blocks = found.config, found.blocks
    t, j = torch.arange(found.tokens), torch.arange(found.importance.shape[-1])
    future = t[None, :] > t[:, None]
    own = t[:, None] // config.select_block
    due = (own[:, 0] + 1).clamp(max=config.select_count)
    per = config.select_block // config.compress_stride
    inner = min(found.matrix.shape[1] - 2, 1)
    column = [int(x) for x in found.matrix[:, inner] if x]
    formula = torch.tensor([count_compressed(n + 1, config) for n in range(found.tokens)])
    # Least importance of a freely chosen block, and largest of one left out.
    forced = (j < config.select_initial) | ((j > own - config.select_local) & (j <= own))
    taken = (blocks[..., None] == j).any(-2)
    free = found.importance.masked_fill(~taken | forced, torch.inf).amin(-1)
    left = found.importance.masked_fill(taken | (j > own), -torch.inf).amax(-1)
    return [
        ("no query of any branch sees a later token",
         not any((mask & future).any() for mask in found.sees.values())),
        (f"a window holds min(t + 1, w = {config.window}) tokens",
         torch.equal(found.sees["win"][0].sum(-1), (t + 1).clamp(max=config.window))),
        (f"query t sees (t + 1 - l) // d + 1 compressed keys, none before t = l - 1 = "
         f"{config.compress_block - 1}", bool(((found.p_cmp > 0).sum(-1) == formula).all())),
        ("p_cmp adds up to 1 where a compressed key is seen and to 0 where none is",
         bool(torch.allclose(found.p_cmp.sum(-1), (formula > 0).to(found.p_cmp.dtype)))),
        (f"a block shares {column} strides with the compressed blocks that reach into it",
         len(column) == per + config.compress_block // config.compress_stride - 1),
        (f"every query selects min(n = {config.select_count}, blocks begun) blocks, each once",
         bool(((blocks >= 0).sum(-1) == due).all())),
        ("its own block is among them, and the first", all(
            bool((blocks == wanted).any(-1).all()) for wanted in (own, 0))),
        ("every query attends to its own token in the selected branch",
         bool(found.sees["slc"][:, t, t].all())),
        ("the free choices are the most important legal blocks", bool((free >= left).all())),
        ("gates are between 0 and 1, three for each query head",
         bool(((found.gates > 0) & (found.gates < 1)).all())),
    ]  # fmt: skip
