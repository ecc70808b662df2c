"""A second opinion on the definition: scalar Python loops over lists, nothing shared with nsa.

Slow and obvious. Agrees with the reference or one of the two misreads the paper.
"""

import math


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(scores):
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    return [w / sum(weights) for w in weights]


def attend(query, keys, values, seen, scale, width):
    """One query over those keys that it sees; `width` zeros if there is none."""
    probs = softmax([dot(query, keys[s]) * scale for s in seen]) if seen else []
    return [sum(p * values[s][c] for p, s in zip(probs, seen, strict=True)) for c in range(width)]


def mean(rows):
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def nsa_one_group(q, k, v, gates, cfg):
    """One KV head and its G query heads: q[g][t], k[b][t], v[b][t], gates[g][t] as nested lists.

    Returns o[g][t] and the selected blocks[t].
    """
    tokens, scale = len(q[0]), len(q[0][0]) ** -0.5
    width = len(v["cmp"][0])
    starts = range(0, tokens - cfg.compress_block + 1, cfg.compress_stride)
    k_cmp = [mean(k["cmp"][s : s + cfg.compress_block]) for s in starts]
    v_cmp = [mean(v["cmp"][s : s + cfg.compress_block]) for s in starts]
    o, chosen = [[] for _ in q], []
    for t in range(tokens):
        seen = [i for i, s in enumerate(starts) if s + cfg.compress_block - 1 <= t]
        importance = [0.0] * (t // cfg.select_block + 1)
        if seen:
            for query in (head[t] for head in q):
                probs = softmax([dot(query, k_cmp[i]) * scale for i in seen])
                for p, i in zip(probs, seen, strict=True):
                    for j in range(len(importance)):
                        importance[j] += p * shared_strides(i, j, cfg)
        own = t // cfg.select_block
        forced = {j for j in range(own + 1) if j < cfg.select_initial or j > own - cfg.select_local}
        rest = sorted((j for j in range(own + 1) if j not in forced), key=lambda j: -importance[j])
        blocks = sorted([*sorted(forced), *rest][: cfg.select_count])
        chosen.append(blocks)
        inside = [s for s in range(t + 1) if s // cfg.select_block in blocks]
        recent = [s for s in range(t + 1) if t - s < cfg.window]
        branches = (k_cmp, v_cmp, seen), (k["slc"], v["slc"], inside), (k["win"], v["win"], recent)
        for g, head in enumerate(q):
            parts = [attend(head[t], *branch, scale, width) for branch in branches]
            o[g].append([dot(gates[g][t], column) for column in zip(*parts, strict=True)])
    return o, chosen


def shared_strides(i, j, cfg):
    """Strides of d tokens in both compressed block i and selectable block j, counted one by one."""
    d = cfg.compress_stride
    compressed = {(i * d + x) // d for x in range(0, cfg.compress_block, d)}
    selectable = {(j * cfg.select_block + x) // d for x in range(0, cfg.select_block, d)}
    return len(compressed & selectable)
