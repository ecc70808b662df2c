"""What attention should give at chosen query rows, from the definition, in any dtype.

At a benchmark's own T the definition's T x T masks do not fit; a few rows of them do. With dO zero
at all other rows, every gradient is known exactly, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.experiments.comparison.dense import operands
from nsa.experiments.comparison.implementations import DENSE
from nsa.lab.measure.attention_inputs import Drawn
from nsa.reference.attend import attend
from nsa.reference.compress import Phi, compress_keys, compress_values
from nsa.reference.nsa import combine, compressed_visible
from nsa.reference.select import selected_tokens

ELEMENTS = 1 << 27  # scores of one branch that are held at once


@dataclass(frozen=True)
class Rows:
    """o [B, R, HQ, DV] at the rows and, by leaf, the gradients of the sum over rows of o dO.

    Those of q and gates are at the rows alone (elsewhere they are 0), the others whole.
    """

    o: Tensor
    grads: dict[str, Tensor]


def at_rows(
    drawn: Drawn, rows: Tensor, blocks: Tensor | None, operation: str, dtype: torch.dtype
) -> Rows:
    """The definition evaluated in `dtype` on inputs as drawn, for queries at positions rows [R].

    blocks [B, R, HKV, n] is the selection at those rows; dense attention needs none. Rows are done
    a few at a time; what they add to the keys' and values' gradients is summed in fp64.
    """
    given = operands(drawn) if operation == DENSE else drawn.leaves()
    whole = {n: x.detach().to(dtype) for n, x in given.items() if n not in ("q", "gates")}
    per_row = drawn.shape.batch * drawn.shape.heads * drawn.shape.tokens
    step = max(1, ELEMENTS // per_row)
    single = step >= len(rows)
    sums = {n: torch.zeros_like(x, dtype=dtype if single else torch.float64)
            for n, x in whole.items()}  # fmt: skip
    parts: dict[str, list[Tensor]] = {name: [] for name in given if name in ("q", "gates")}
    outputs = []
    for first in range(0, len(rows), step):
        chunk = rows[first : first + step]
        leaves = {n: given[n].detach()[:, chunk].to(dtype) for n in parts} | whole
        leaves = {n: x.detach().requires_grad_() for n, x in leaves.items()}
        some = None if blocks is None else blocks[:, first : first + step]
        o = _evaluate(leaves, chunk, some, drawn.shape.config)
        do = drawn.do[:, chunk].to(dtype)
        grads = torch.autograd.grad(o, list(leaves.values()), do)
        for name, grad in zip(leaves, grads, strict=True):
            if name in parts:
                parts[name].append(grad)
            else:
                sums[name] += grad
        outputs.append(o.detach())
    return Rows(torch.cat(outputs, 1), {n: torch.cat(g, 1) for n, g in parts.items()} | sums)


def _evaluate(
    leaves: Mapping[str, Tensor], rows: Tensor, blocks: Tensor | None, config: NSAConfig
) -> Tensor:
    q = leaves["q"]
    scale = q.shape[3] ** -0.5
    k, v = ({n.partition("_")[2]: x for n, x in leaves.items() if n[0] == side} for side in "kv")
    tokens = next(iter(k.values())).shape[1]
    distance = rows[:, None] - torch.arange(tokens, device=rows.device)
    causal = distance >= 0
    if "gates" not in leaves:
        (k_all,), (v_all,) = k.values(), v.values()
        return attend(q, k_all, v_all, causal[None, None], scale)[0]

    def of(side: Mapping[str, Tensor], branch: str) -> Tensor:
        return side[branch] if branch in side else side[""]

    k_cmp = compress_keys(of(k, "cmp"), Phi(), config)
    v_cmp = compress_values(of(v, "cmp"), Phi(), config)
    visible = {
        "cmp": compressed_visible(rows, k_cmp.shape[1], config),
        "slc": selected_tokens(blocks, tokens, config) & causal,
        "win": (causal & (distance < config.window))[None, None],
    }
    outputs = {"cmp": attend(q, k_cmp, v_cmp, visible["cmp"], scale)[0]}
    for branch in ("slc", "win"):
        outputs[branch], _ = attend(q, of(k, branch), of(v, branch), visible[branch], scale)
    return combine(leaves["gates"], outputs)
