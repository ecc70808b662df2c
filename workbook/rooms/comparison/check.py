"""Check accuracy before speed: an implementation against fp64, its selection revealed externally.

At a benchmark's own T the definition's T x T masks do not fit; a few rows of them do. With dO zero
at all other rows, every gradient is known exactly, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.blocks import count_selectable
from nsa.config import NSAConfig
from nsa.reference.attend import attend
from nsa.reference.compress import Phi, compress_keys, compress_values
from nsa.reference.nsa import BRANCHES, combine, compressed_visible
from nsa.reference.select import selected_tokens
from workbook.lab.measure.accuracy import AccuracyError, Error, hold
from workbook.lab.measure.attention_inputs import Drawn, importance_at, select_at
from workbook.lab.measure.shapes import Shape
from workbook.rooms.comparison.implementations import NSA, Implementation, operands

ELEMENTS = 1 << 27  # scores of one branch held at once
SAMPLE = 64  # query rows that are checked if T is too long for all of them
ALL_ROWS = 4096  # T up to which all rows are checked
MOST_PASSES = 16  # limit on forwards to reveal a selection
BY_QUERY = ("q", "gates")  # leaves whose gradient is 0 where dO is


def at_rows(
    drawn: Drawn, rows: Tensor, blocks: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    """Evaluate the definition in `dtype` on the drawn inputs, for queries at positions rows [R].

    Returns o [B, R, HQ, DV] and, by leaf, the gradients of the sum over rows of o dO: for BY_QUERY
    only at these rows, for the others in full. blocks [B, R, HKV, n] is the selection at those
    rows, None for dense attention. Rows are processed in chunks, whose gradients of keys and
    values are accumulated in fp64.
    """
    given = operands(drawn) if blocks is None else drawn.leaves()
    whole = {n: x.detach().to(dtype) for n, x in given.items() if n not in BY_QUERY}
    step = max(1, ELEMENTS // (drawn.shape.batch * drawn.shape.heads * drawn.shape.tokens))
    summed_in = dtype if step >= len(rows) else torch.float64
    sums = {n: torch.zeros_like(x, dtype=summed_in) for n, x in whole.items()}
    parts: dict[str, list[Tensor]] = {name: [] for name in given if name in BY_QUERY}
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
    return torch.cat(outputs, 1), {n: torch.cat(g, 1) for n, g in parts.items()} | sums


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

    k, v = (dict.fromkeys(BRANCHES, x[""]) if "" in x else x for x in (k, v))
    k["cmp"] = compress_keys(k["cmp"], Phi(), config)
    v["cmp"] = compress_values(v["cmp"], Phi(), config)
    visible = {
        "cmp": compressed_visible(rows, k["cmp"].shape[1], config),
        "slc": selected_tokens(blocks, tokens, config) & causal,
        "win": (causal & (distance < config.window))[None, None],
    }
    o = {b: attend(q, k[b], v[b], visible[b], scale)[0] for b in BRANCHES}
    return combine(leaves["gates"], o)


@torch.no_grad()
def revealed(implementation: Implementation, drawn: Drawn, rows: Tensor) -> Tensor:
    """Return the blocks [B, R, HKV, n] that an implementation selects for the queries at `rows`.

    With only the selected branch gated in and values that encode their block, o holds each block's
    probability: DV blocks per forward. Raises AccuracyError if the heads of a group disagree, or
    if the number of blocks is wrong.
    """
    shape, config = drawn.shape, drawn.shape.config
    count = count_selectable(shape.tokens, config)
    block = torch.arange(shape.tokens, device=drawn.q.device) // config.select_block
    gates = torch.zeros_like(drawn.gates)
    gates[..., 1] = 1
    values = drawn.v if shape.shared_kv else drawn.v["slc"]
    chosen = []
    for first in range(0, count, shape.value_dim):
        column = torch.arange(first, first + shape.value_dim, device=block.device)
        tag = (block[:, None] == column).to(values.dtype)[None, :, None]
        tag = tag.expand_as(values).contiguous()
        v = tag if shape.shared_kv else dict.fromkeys(drawn.v, tag)
        o = implementation.call(replace(drawn, v=v, gates=gates), None)
        if not bool(o[:, rows].isfinite().all()):
            raise AccuracyError("the selected branch alone is not finite")
        chosen.append(o[:, rows, :, : count - first] > 0)
    mask = torch.cat(chosen, -1).unflatten(2, (shape.kv_heads, -1))  # [B, R, HKV, G, NB]
    if not torch.equal(mask.any(3), mask.all(3)):
        raise AccuracyError("the heads of a group select different blocks")
    mask = mask.any(3)
    wanted = (rows // config.select_block + 1).clamp(max=config.select_count)
    wrong = mask.sum(-1) != wanted[:, None]
    if bool(wrong.any()):
        _, row, _ = wrong.nonzero()[0].tolist()
        got = sorted(set(mask[:, row].sum(-1).flatten().tolist()))
        what = f"query {int(rows[row])} selects {got} blocks"
        raise AccuracyError(f"{what}, {int(wanted[row])} are right")
    ranked = torch.where(mask, torch.arange(count, device=rows.device), count).sort(dim=-1).values
    ranked = F.pad(ranked, (0, config.select_count - count), value=count)  # below 0 it crops
    return torch.where(ranked == count, -1, ranked).to(torch.int32)


@torch.no_grad()
def hold_selection(drawn: Drawn, rows: Tensor, blocks: Tensor) -> None:
    """Raise AccuracyError if the blocks lose more of the exact importance than twice plain torch's.

    Near ties may resolve either way, so indices are not compared.
    """
    config, dtype = drawn.shape.config, drawn.q.dtype
    exact = importance(drawn, rows, torch.float64)
    best = select_at(exact, rows, config)
    plain = select_at(importance(drawn, rows, dtype), rows, config)

    def kept(chosen: Tensor) -> Tensor:
        weight = exact.gather(-1, chosen.long().clamp(min=0))
        return weight.masked_fill(chosen < 0, 0.0).sum(-1)

    own = (rows // config.select_block)[:, None]  # [R, 1], against blocks [B, R, HKV, n]
    forced = [own - j for j in range(config.select_local)]
    forced += [torch.full_like(own, j) for j in range(config.select_initial)]
    for block in forced:
        legal = (block >= 0) & (block <= own)
        if bool((legal & ~(blocks == block[..., None]).any(-1)).any()):
            raise AccuracyError("a query does not select its local blocks and the first ones")
    most = kept(best)
    lost, stick = most - kept(blocks), (most - kept(plain)).abs()
    grain = torch.finfo(dtype).eps / 4 * float(most.mean()) / config.select_count
    noise = 4 * torch.finfo(torch.float32).eps * float(most.max())
    for kind, over_all in (("worst", torch.max), ("mean", torch.mean)):
        ours, limit = float(over_all(lost)), 2 * float(over_all(stick)) + grain + noise
        if ours > limit:
            raise AccuracyError(
                f"its selection loses {ours:.2e} of importance ({kind}) > {limit:.2e}; "
                f"the best keeps {float(most.mean()):.2e}"
            )


def importance(drawn: Drawn, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Importance [B, R, HKV, NB], computed in `dtype`."""
    k = drawn.by_branch("k")["cmp"].detach().to(dtype)
    k_cmp = compress_keys(k, Phi(), drawn.shape.config)
    q = drawn.q.detach()[:, rows].to(dtype)
    return importance_at(q, k_cmp, rows, drawn.shape.tokens, drawn.shape.config)


@torch.no_grad()
def handed_in(drawn: Drawn, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks (at rows, for all rows): the exact selection at `rows`, the newest n elsewhere."""
    config, tokens = drawn.shape.config, drawn.shape.tokens
    blocks = select_at(importance(drawn, rows, torch.float64), rows, config)
    own = torch.arange(tokens, device=rows.device) // config.select_block
    slots = torch.arange(config.select_count, device=rows.device)
    newest = (own[:, None] - config.select_count + 1).clamp(min=0) + slots
    plain = torch.where(newest <= own[:, None], newest, -1).to(torch.int32)
    whole = plain[None, :, None].repeat(drawn.shape.batch, 1, drawn.shape.kv_heads, 1)
    whole[:, rows] = blocks
    return blocks, whole


class NoGradient(Exception):
    """Raised if the output depends on no input in autograd's graph, so has no backward."""


@dataclass(frozen=True)
class Checked:
    """Description of a comparison, the errors of o and of each gradient, and the expected o.

    rows [R] with plain torch's o and the exact one there, [B, R, HQ, DV] each, are for the
    implementation's own selection; rows is None if a selection was passed in.
    """

    what: str
    errors: tuple[Error, ...]
    rows: Tensor | None = None
    plain: Tensor | None = None
    exact: Tensor | None = None

    def hold_again(self, o: Tensor, when: str) -> None:
        """Raise AccuracyError if a later output from the same inputs is less accurate."""
        if not bool(o.isfinite().all()):
            raise AccuracyError(f"o {when} is not finite")
        if self.rows is not None:
            got = o.detach()[:, self.rows]
            hold(f"o {when}", got, self.plain, self.exact, dtype=o.dtype)

    def by_mode(self) -> dict[str, list[float]]:
        """Return {mode: [worst, limit]}: of o, and of the gradient closest to its limit."""
        o, *grads = self.errors
        found = {"forward": [o.worst, o.limit]}
        if grads:
            nearest = max(grads, key=lambda e: e.worst / (e.limit or 1))
            found["backward"] = [nearest.worst, nearest.limit]
        return found


def small(shape: Shape) -> Shape:
    """Shape of equal dims, group and config, few KV heads and just enough tokens for a choice."""
    config = shape.config
    tokens = config.select_block * (config.select_count + 4) + config.select_block // 2 + 5
    kv_heads = min(shape.kv_heads, 2)
    heads = {"heads": kv_heads * shape.group, "kv_heads": kv_heads}
    return replace(shape, tokens=min(shape.tokens, tokens), batch=min(shape.batch, 2), **heads)


def sample_rows(tokens: int, device: torch.device) -> Tensor:
    """All rows of a short sequence; SAMPLE ascending rows of a long one, with first and last."""
    if tokens <= ALL_ROWS:
        return torch.arange(tokens, device=device)
    generator = torch.Generator().manual_seed(0)
    chosen = {0, 1, tokens // 2, *range(tokens - 8, tokens)}
    while len(chosen) < SAMPLE:
        chosen.add(int(torch.randint(tokens, (), generator=generator)))
    return torch.tensor(sorted(chosen), device=device)


def check(
    implementation: Implementation, drawn: Drawn, *, backward: bool = True, reveal: bool = True
) -> Checked:
    """Check the accuracy rule at `sample_rows`; AccuracyError reports where it fails.

    With `reveal`, its own selection is first revealed and compared with the exact importance; else
    a selection made by plain torch is passed in. Gradients are for a dO that is 0 outside the
    rows; with dO everywhere they must be finite. Raises NoGradient if `backward` is requested and
    the output has no gradient. Exceptions of the implementation propagate.
    """
    nsa, dtype = implementation.operation == NSA, drawn.q.dtype
    rows = sample_rows(drawn.shape.tokens, drawn.q.device)
    every = len(rows) == drawn.shape.tokens
    what = "all rows" if every else f"{len(rows)} rows"
    blocks, handed = None, None
    if nsa and reveal:
        blocks = revealed(implementation, drawn, rows)
        hold_selection(drawn, rows, blocks)
        what += ", own selection"
    elif nsa:
        blocks, handed = handed_in(drawn, rows)
        what += ", selection handed in"
    leaves = drawn.leaves()
    inputs = {n: leaves[n] for n in implementation.reaches(drawn)} if backward else {}
    with torch.set_grad_enabled(backward):
        o = implementation.call(drawn, handed)
    if bad := int((~o.isfinite()).sum()):
        raise AccuracyError(f"o: {bad} values are not finite, of {o.numel()}")
    if backward and not o.requires_grad:
        raise NoGradient("its output has no gradient")
    grads: dict[str, Tensor] = {}
    if backward:
        if not every:
            whole = _gradients(o, inputs, drawn.do)
            if wrong := [f"d{n}" for n, grad in whole.items() if not bool(grad.isfinite().all())]:
                raise AccuracyError(f"{', '.join(wrong)} with dO at all queries: not finite")
            del whole
        do = torch.zeros_like(drawn.do)
        do[:, rows] = drawn.do[:, rows]
        grads = _gradients(o, inputs, do)
        del do
    got = o.detach()[:, rows]
    del o
    what += ", forward and gradients" if backward else ", forward"
    exact, exact_grads = at_rows(drawn, rows, blocks, torch.float64)
    plain, plain_grads = at_rows(drawn, rows, blocks, dtype)
    errors = [hold("o", got, plain, exact, dtype=dtype)]
    largest = max(float(x.abs().max()) for x in exact_grads.values())
    for name in inputs:
        grad = grads.pop(name)
        if name in BY_QUERY:
            at = grad[:, rows]
            if not every:
                grad[:, rows] = 0
                if stray := int((grad != 0).sum()):  # NaN counts, too
                    text = f"d{name}: {stray} values are not 0 at queries whose dO is 0"
                    raise AccuracyError(text)
            grad = at
        same, right = plain_grads.pop(name), exact_grads.pop(name)
        errors.append(hold(f"d{name}", grad, same, right, dtype=dtype, magnitude=largest))
    return Checked(what, tuple(errors), None if handed is not None else rows, plain, exact)


def _gradients(o: Tensor, inputs: dict[str, Tensor], do: Tensor) -> dict[str, Tensor]:
    """Gradients by name; AccuracyError if one does not reach its input.

    The graph is retained: a compiled backward whose first run frees it can never retain it later,
    as timing the backward alone requires (torch's donated buffers).
    """
    found = torch.autograd.grad(o, [*inputs.values()], do, retain_graph=True, allow_unused=True)
    missing = [f"d{name}" for name, grad in zip(inputs, found, strict=True) if grad is None]
    if missing:
        raise AccuracyError(f"no gradient reaches {', '.join(missing)}")
    return dict(zip(inputs, found, strict=True))
