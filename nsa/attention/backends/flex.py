"""flex: torch's flex_attention, each branch a block-sparse mask.

Compiled on a GPU, it holds no T x T tensor per head: for the selected branch a block mask of
HQ T^2 / 2048 bytes and a bit for each query, KV head and selectable block, HKV T^2 / (8 l') bytes.
flex_attention has no backward on a CPU and computes T x T scores there, so on a CPU it runs
forward only.
"""

import warnings
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from nsa.attention.branches import empty_slots, no_keys, run_with_selected
from nsa.attention.inputs import Inputs
from nsa.attention.registry import Backend, Note
from nsa.blocks import Span, count_selectable

TILE = 128  # queries and keys under one entry of the block mask
WORD = 8  # blocks in one byte of the selection's bits; wider words overflow shared memory


def _served(inputs: Inputs) -> str:
    return "flex-compiled" if inputs.q.is_cuda else "flex-uncompiled"


def _attend_span(
    inputs: Inputs, k: Tensor, v: Tensor, span: Span
) -> tuple[tuple[Tensor, Tensor | None], str]:
    q, start = inputs.q, inputs.q_start
    if k.shape[1] == 0:
        return no_keys(inputs), _served(inputs)
    length, stride = span.length, span.stride
    # Any number past the last key's means "no limit".
    reach = (span.lookback or k.shape[1] + 1) * stride

    def visible(b, h, t, s):
        ended = start + t + 1 - length - s * stride
        return (ended >= 0) & (ended < reach)

    tiles = span_tiles(span, q.shape[1], k.shape[1], q.device, start)
    return _flex(inputs, k, v, visible, tiles[None, None]), _served(inputs)


def _attend_selected(inputs: Inputs, blocks: Tensor, note: Note) -> tuple[Tensor, Tensor | None]:
    note("slc", _served(inputs))
    k, v, size, group = inputs.k["slc"], inputs.v["slc"], inputs.config.select_block, inputs.group
    start = inputs.q_start
    bits = selection_bits(blocks, count_selectable(k.shape[1], inputs.config))

    def visible(b, h, t, s):
        j = s // size
        chosen = (bits[b, t, h // group, j // WORD].to(torch.int32) >> (j % WORD)) & 1
        return (chosen == 1) & (s <= start + t)

    tiles = selection_tiles(blocks, k.shape[1], size, start).repeat_interleave(group, dim=1)
    return _flex(inputs, k, v, visible, tiles)


def selection_bits(blocks: Tensor, count: int) -> Tensor:
    """[B, T, HKV, words] uint8: bit j % WORD of word j // WORD is 1 if block j is selected."""
    shape = (*blocks.shape[:3], -(-count // WORD))
    words = torch.zeros(shape, dtype=torch.uint8, device=blocks.device)
    wanted = ~empty_slots(blocks, count)  # a repeated block sets its bit once
    j = torch.where(wanted, blocks, 0).long()
    bits = torch.where(wanted, 1 << (j % WORD), 0).to(torch.uint8)
    return words.scatter_add(-1, j // WORD, bits)


def selection_tiles(blocks: Tensor, keys: int, size: int, start: int = 0) -> Tensor:
    """[B, HKV, T / TILE, keys / TILE]: True if a query of the tile selects a block in it.

    The first query is at position start.
    """
    batch, tokens, kv_heads, slots = blocks.shape
    rows, columns = -(-tokens // TILE), -(-keys // TILE)
    padded = torch.nn.functional.pad(blocks, (0, 0, 0, 0, 0, rows * TILE - tokens), value=-1)
    chosen = padded.long().transpose(1, 2).reshape(batch, kv_heads, rows, TILE * slots)
    tiles = torch.zeros(batch, kv_heads, rows, columns + 1, dtype=torch.bool, device=blocks.device)
    first, last = chosen * size // TILE, ((chosen + 1) * size - 1) // TILE
    absent = (chosen < 0) | (chosen * size >= keys)
    for offset in range((size - 1) // TILE + 2):
        column = torch.minimum(first + offset, last).clamp(max=columns - 1)
        tiles = tiles.scatter(-1, torch.where(absent, columns, column), True)
    # A tile behind its last query is all future.
    row_end = start + torch.arange(1, rows + 1, device=blocks.device)[:, None] * TILE
    return tiles[..., :columns] & (torch.arange(columns, device=blocks.device) * TILE < row_end)


def span_tiles(
    span: Span, tokens: int, keys: int, device: torch.device | str = "cpu", start: int = 0
) -> Tensor:
    """[T / TILE, keys / TILE] on the device: True if a query of the tile sees a key in it.

    The first query is at position start.
    """
    first = start + torch.arange(0, tokens, TILE, device=device)[:, None]
    column = torch.arange(-(-keys // TILE), device=device)
    low = span.ended(first) - (keys if span.lookback is None else span.lookback)
    high = span.ended((first + TILE).clamp(max=start + tokens) - 1)
    return (column >= low // TILE) & (column * TILE < high)


def _flex(
    inputs: Inputs, k: Tensor, v: Tensor, visible: Callable, tiles: Tensor
) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

    q = inputs.q
    if not q.is_cuda:
        # Without gradients by `why_not`; flex_attention refuses leaves that could take one.
        q, k, v = q.detach(), k.detach(), v.detach()
    order = tiles.int().argsort(dim=-1, descending=True, stable=True).int()
    held, lengths = tiles.sum(-1, dtype=torch.int32), (q.shape[1], k.shape[1])
    mask = BlockMask.from_kv_blocks(
        held, order, BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=lengths
    )
    asked = {"return_aux": AuxRequest(lse=True)} if inputs.needs_lse else {}
    # The default of 8 shapes is few for a process that sweeps them; a miss raises, never degrades.
    recompiles = torch._dynamo.config.patch(recompile_limit=256)
    with recompiles, warnings.catch_warnings():
        # The docstring and the path witness say "uncompiled" where torch would warn of it.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        # Dynamo inspects non-leaf inputs, and hides this from the console only.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
        o = _flex_attention(q.is_cuda)(
            *(x.transpose(1, 2) for x in (q, k, v)),
            block_mask=mask,
            scale=inputs.scale,
            enable_gqa=inputs.group > 1,
            # The decoding kernel that "AUTO" uses for short T has no configuration for some groups.
            kernel_options={"BACKEND": "TRITON"},
            **asked,
        )
    if not asked:
        return o.transpose(1, 2), None
    o, aux = o
    return o.transpose(1, 2), aux.lse.transpose(1, 2)


@cache
def _flex_attention(compiled: bool) -> Callable:
    from torch.nn.attention import flex_attention as module

    if compiled:
        # Each shape separately: kernels for any T needed more shared memory than an H200 has.
        return torch.compile(module.flex_attention, fullgraph=True, dynamic=False)
    return module.flex_attention


def why_not(inputs: Inputs) -> list[str]:
    """Reasons why flex_attention does not support the inputs."""
    q, reasons = inputs.q, []
    tensors = [q, *inputs.k.values(), *inputs.v.values(), *inputs.phi.tensors()]
    if q.is_cuda:
        if q.dtype == torch.float64:
            reasons.append("needs fp32, bf16 or fp16 on a GPU, got torch.float64")
        if min(q.shape[3], inputs.value_dim) < 16:
            reasons.append(f"needs D and DV of at least 16, got {q.shape[3]}, {inputs.value_dim}")
    elif torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        reasons.append(
            f"flex_attention has no backward on {q.device.type}; "
            "use a GPU, torch.no_grad() or another backend"
        )
    return reasons


def not_for_auto(inputs: Inputs) -> list[str]:
    """Reasons why `auto` skips this backend although it would run."""
    reasons = [] if inputs.q.is_cuda else ["computes T x T scores on a CPU"]
    if inputs.cu_seqlens is not None:
        reasons.append("recompiles for each length of a packed sequence")
    return reasons


BACKEND = Backend(
    "flex",
    partial(run_with_selected, selected=_attend_selected, spans=_attend_span),
    summary="flex_attention with block-sparse masks; linear memory on a GPU, forward only on a CPU",
    quadratic=False,
    why_not=why_not,
    not_for_auto=not_for_auto,
)
