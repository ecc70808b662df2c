"""Which blocks an implementation selects, found out from outside and held to the exact choice."""

from dataclasses import replace

import torch
from torch import Tensor

from nsa.blocks import count_selectable
from nsa.experiments.comparison.implementations import Implementation
from nsa.lab.measure.accuracy import Red
from nsa.lab.measure.attention_inputs import Drawn, importance_at, select_at
from nsa.reference.compress import Phi, compress_keys


@torch.no_grad()
def revealed(implementation: Implementation, drawn: Drawn, rows: Tensor) -> Tensor:
    """The blocks [B, R, HKV, n] that an implementation selects for the queries at `rows`.

    With the selected branch alone let through and values that say of which block they are, o holds
    each block's probability: DV blocks a forward. Red where the heads of a group disagree, or where
    the number of blocks is wrong.
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
        tag = (block[:, None] == column).to(values.dtype)[None, :, None].expand_as(values)
        tag = tag.contiguous()
        v = tag if shape.shared_kv else dict.fromkeys(drawn.v, tag)
        o = implementation.call(replace(drawn, v=v, gates=gates), None)
        if not bool(o[:, rows].isfinite().all()):
            raise Red("the selected branch alone is not finite")
        chosen.append(o[:, rows, :, : count - first] > 0)
    mask = torch.cat(chosen, -1).unflatten(2, (shape.kv_heads, -1))  # [B, R, HKV, G, NB]
    if not torch.equal(mask.any(3), mask.all(3)):
        raise Red("the heads of a group select different blocks")
    mask = mask.any(3)
    wanted = torch.minimum(
        rows // config.select_block + 1, torch.tensor(config.select_count, device=rows.device)
    )
    wrong = mask.sum(-1) != wanted[:, None]
    if bool(wrong.any()):
        _, row, _ = wrong.nonzero()[0].tolist()
        got = sorted(set(mask[:, row].sum(-1).flatten().tolist()))
        raise Red(f"query {int(rows[row])} selects {got} blocks, {int(wanted[row])} are right")
    order = torch.arange(count, device=rows.device)
    ranked = torch.where(mask, order, count).sort(dim=-1).values[..., : config.select_count]
    ranked = torch.nn.functional.pad(
        ranked, (0, config.select_count - ranked.shape[-1]), value=count
    )
    return torch.where(ranked == count, -1, ranked).to(torch.int32)


@torch.no_grad()
def hold_selection(drawn: Drawn, rows: Tensor, blocks: Tensor) -> None:
    """Red unless the blocks keep as much exact importance as plain torch's choice would, twice off.

    Near ties may fall either way, so indices are not compared.
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
            raise Red("a query does not select its local blocks and the first ones")
    most = kept(best)
    lost, stick = most - kept(blocks), most - kept(plain)
    grain = torch.finfo(dtype).eps / 4 * float(most.mean()) / config.select_count
    noise = 4 * torch.finfo(torch.float32).eps * float(most.max())
    for kind, ours, torchs in (
        ("worst", lost.max(), stick.abs().max()),
        ("mean", lost.mean(), stick.abs().mean()),
    ):
        limit = 2 * float(torchs) + grain + noise
        if float(ours) > limit:
            raise Red(
                f"its selection loses {float(ours):.2e} of importance ({kind}) > {limit:.2e}; "
                f"the best keeps {float(most.mean()):.2e}"
            )


def importance(drawn: Drawn, rows: Tensor, dtype: torch.dtype) -> Tensor:
    k = drawn.by_branch("k")["cmp"].detach().to(dtype)
    k_cmp = compress_keys(k, Phi(), drawn.shape.config)
    q = drawn.q.detach()[:, rows].to(dtype)
    return importance_at(q, k_cmp, rows, drawn.shape.tokens, drawn.shape.config)


@torch.no_grad()
def handed_in(drawn: Drawn, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(at rows, for all rows): the exact selection at `rows`, the newest n blocks elsewhere."""
    config, tokens = drawn.shape.config, drawn.shape.tokens
    blocks = select_at(importance(drawn, rows, torch.float64), rows, config)
    own = torch.arange(tokens, device=rows.device) // config.select_block
    slots = torch.arange(config.select_count, device=rows.device)
    newest = (own[:, None] - config.select_count + 1).clamp(min=0) + slots
    plain = torch.where(newest <= own[:, None], newest, -1).to(torch.int32)
    whole = plain[None, :, None].repeat(drawn.shape.batch, 1, drawn.shape.kv_heads, 1)
    whole[:, rows] = blocks
    return blocks, whole
