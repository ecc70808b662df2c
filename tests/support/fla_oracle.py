"""A model of flash-linear-attention's NSA layout, computed query by query from its definition.

Written from what fla's layer, model and kernels say in words and shapes; nothing of this package is
called, so that a conversion has something to be held against where fla is not installed.
"""

import torch
from torch.nn.functional import silu

SIZES = {
    "model_type": "nsa",
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 32,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "block_size": 16,
    "block_counts": 4,
    "window_size": 24,
    "rope_theta": 10000.0,
    "norm_eps": 1e-6,
    "hidden_act": "swish",
    "qkv_bias": False,
    "tie_word_embeddings": False,
}


def drawn(theirs, seed=0):
    """{name: fp64 weight} under fla's names, so large that all branches and gates matter."""
    generator = torch.Generator().manual_seed(seed)
    wide, narrow = (theirs[f"num_{kind}heads"] * theirs["head_dim"] for kind in ("", "kv_"))
    dim, mlp = theirs["hidden_size"], theirs["intermediate_size"]
    shapes = {"model.embeddings": (theirs["vocab_size"], dim), "model.norm": (dim,)}
    if not theirs["tie_word_embeddings"]:
        shapes["lm_head"] = shapes["model.embeddings"]
    layer = {"attn_norm": (dim,), "mlp_norm": (dim,), "mlp.down_proj": (dim, mlp)}
    layer |= {"mlp.gate_proj": (mlp, dim), "mlp.up_proj": (mlp, dim), "attn.q_proj": (wide, dim)}
    layer |= {"attn.k_proj": (narrow, dim), "attn.v_proj": (narrow, dim)}
    layer |= {"attn.g_proj": (3 * theirs["num_heads"], dim), "attn.o_proj": (dim, wide)}
    for index in range(theirs["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    found = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        found[f"{name}.weight"] = 1 + values / 10 if len(shape) == 1 else values * 0.15
    return found


def logits(theirs, weights, ids):
    """[T, V] of one sequence of T ids."""

    def normed(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + theirs["norm_eps"]).sqrt() * weight

    x = weights["model.embeddings.weight"][ids]
    for index in range(theirs["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        own = {n[len(prefix) : -7]: w for n, w in weights.items() if n.startswith(prefix)}
        x = x + attention(theirs, own, normed(x, own["attn_norm"]))
        h = normed(x, own["mlp_norm"])
        hidden = silu(h @ own["mlp.gate_proj"].T) * (h @ own["mlp.up_proj"].T)
        x = x + hidden @ own["mlp.down_proj"].T
    head = weights.get("lm_head.weight", weights["model.embeddings.weight"])
    return normed(x, weights["model.norm.weight"]) @ head.T


def attention(theirs, own, x):
    """One layer: [T, E] to [T, E]."""
    size, window = theirs["block_size"], theirs["window_size"]
    count = 2 ** (theirs["block_counts"] - 1).bit_length()  # as the kernels read it
    heads, groups, width = (theirs[n] for n in ("num_heads", "num_kv_heads", "head_dim"))
    tokens, each = len(x), heads // groups
    q = turned((x @ own["attn.q_proj"].T).view(tokens, heads, width), theirs["rope_theta"])
    k = turned((x @ own["attn.k_proj"].T).view(tokens, groups, width), theirs["rope_theta"])
    v = (x @ own["attn.v_proj"].T).view(tokens, groups, width)
    gates = (x @ own["attn.g_proj"].T).view(tokens, heads, 3).sigmoid()
    whole = tokens // size
    k_mean, v_mean = (y[: whole * size].view(whole, size, groups, width).mean(1) for y in (k, v))
    o = torch.zeros(tokens, heads, width, dtype=x.dtype)
    for t in range(tokens):
        past, block = (t + 1) // size, t // size  # blocks that have ended; the query's own
        for h in range(groups):
            mine = slice(h * each, (h + 1) * each)
            rows = q[t, mine] / width**0.5
            p = (rows @ k_mean[:past, h].T).softmax(-1)  # [G, past]
            forced = {0, block - 1, block} - {-1}
            others = [b for b in range(block) if b not in forced]
            sums = p.sum(0).tolist()
            others.sort(key=sums.__getitem__, reverse=True)
            chosen = [*forced, *others][: max(count, len(forced))]
            keys = [s for b in chosen for s in range(b * size, min(b * size + size, t + 1))]
            near = list(range(max(0, t - window + 1), t + 1))
            parts = [p @ v_mean[:past, h]]
            parts += [(rows @ k[at, h].T).softmax(-1) @ v[at, h] for at in (keys, near)]
            o[t, mine] = sum(gates[t, mine, i, None] * part for i, part in enumerate(parts))
    return o.flatten(1) @ own["attn.o_proj"].T


def turned(x, base):
    """[T, H, D]: the first half of a head's numbers with the second, pair by pair."""
    half = x.shape[2] // 2
    speeds = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(len(x), dtype=x.dtype)[:, None, None] * speeds
    pair = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([pair.real, pair.imag], -1)
