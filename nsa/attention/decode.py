"""The operation on new tokens of sequences that a cache holds: decoding, and prefill in chunks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from nsa.attention import cached, prefix, witness
from nsa.attention.api import nsa_attention
from nsa.attention.backends import triton
from nsa.attention.cache import NAMES, LayerCache
from nsa.attention.cached import Call, Recent
from nsa.attention.inputs import (
    DTYPES,
    check_counts,
    check_device,
    check_phi,
    check_sized,
    check_tensor,
    checked_sinks,
)
from nsa.attention.registry import Declined, Note
from nsa.config import NSAConfig
from nsa.reference import decode as reference
from nsa.reference.compress import Phi
from nsa.reference.nsa import combine
from nsa.spelling import choice


@torch.no_grad()
def nsa_decode(
    q: Tensor,
    k: Tensor | Mapping[str, Tensor],
    v: Tensor | Mapping[str, Tensor],
    gates: Tensor,
    cache: LayerCache,
    *,
    config: NSAConfig | None = None,
    phi: Phi | None = None,
    counts: Tensor | None = None,
    backend: str = "auto",
    scale: float | None = None,
    sinks: Tensor | None = None,
    strict: bool = False,
    advance: bool = True,
    blocks: Tensor | None = None,
    return_blocks: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append N tokens to each sequence of a cache and attend from them: o [B, N, HQ, DV].

    Row i of sequence b is at position lengths[b] + i and sees positions up to its own: the last
    rows of `nsa_attention` over the whole sequence (arXiv 2502.11089, Eq. 5). Any N, so that a long
    prompt may come in chunks. No gradient flows.

    Args:
        q: [B, N, HQ, D] in the cache's dtype, rotated by the caller.
        k, v: [B, N, HKV, D] and [B, N, HKV, DV]; one for all branches or a mapping with "cmp",
            "slc" and "win".
        gates: [B, N, HQ, 3], in the order cmp, slc, win.
        cache: defines sizes and branches; modified in place: it holds the new tokens afterwards.
        config: the caller's config; ValueError if the cache was made for another.
        phi: as in `nsa_attention`, the same for all tokens of a sequence; its rotary tables cover
            the cache's capacity.
        counts: [B] int32: how many of the N rows are real. Others are not stored and their o is 0.
        backend: a name in `names()`, which runs or raises, or "auto".
        scale: scale of the scores; D ** -0.5 by default.
        sinks: [HQ] or [HQ, 3], as in `nsa_attention`.
        strict: check lengths, counts and page table first, and o afterwards; waits for the GPU.
        advance: False leaves the lengths to `cache.advance(N, counts)`: layers share them.
        blocks: [B, N, HKV, n] int32 with n = select_count, ascending, -1 last: a selection to use
            instead of scoring one.
        return_blocks: (o, blocks) instead of o: the selection that was used.

    Raises:
        ValueError: inputs do not fit the cache, a full one included, before anything is written;
            Declined if the backend does not accept them.
        FloatingPointError: in strict mode, if an output is not finite.
    """
    call = _checked(q, k, v, gates, cache, config, phi, counts, scale, sinks, blocks)
    if return_blocks and blocks is None:
        blocks = _empty(call)
        call = replace(call, selection=blocks)
    cache.places.room(call.new, counts)
    if strict:
        cache.places.check(call.new, counts)
    name, declined = _choose(backend, call)
    notes: list[tuple[str, str]] = []
    with torch.autocast(q.device.type, enabled=False):
        o = _BACKENDS[name].run(call, lambda *note: notes.append(note))
    if not torch.compiler.is_compiling():
        witness.saw_call(f"decode-{name}", notes, declined)
    if strict and not bool(o.isfinite().all()):
        raise FloatingPointError(f"the output of decode-{name} at {witness.place()} is not finite")
    if advance:
        cache.advance(call.new, counts)
    return (o, blocks) if return_blocks else o


def names() -> list[str]:
    """Names of the backends of `nsa_decode`."""
    return list(_BACKENDS)


def _reference(call: Call, note: Note) -> Tensor:
    cache, recent, lengths = call.cache, call.recent(), call.cache.lengths
    call.append()
    shape, ends, k, v = cache.shape, call.ends, {}, {}
    if shape.raw_ring:
        blocks = call.bound // shape.config.compress_stride
        k["cmp"], v["cmp"] = cache.compressed(blocks, ends)
    if "slc" in shape.branches:
        k["slc"], v["slc"] = cache.tokens(call.bound, ends)
    if recent is not None:
        k["win"], v["win"] = recent
    v = {branch: x for branch, x in v.items() if x is not None}
    sizes = {"branches": shape.branches, "scale": call.scale, "sinks": call.sinks}
    sizes |= {"blocks": call.blocks, "selection": call.selection}
    note("all", "reference")
    given = call.q, k, v, call.gates, shape.config, lengths, ends - lengths
    return reference.decode(*given, **sizes)


def _on_torch(attend: Callable[[Call, Recent, Note], dict[str, Tensor]]):
    def run(call: Call, note: Note) -> Tensor:
        recent = call.recent()
        call.append()
        o = combine(call.gates, attend(call, recent, note)).to(call.q.dtype)
        return call.without_rows_behind(o)

    return run


def _forward(call: Call, note: Note) -> Tensor:
    k, v = (call.without_rows_behind(x) for _, x in call.sides())
    config, branches = call.cache.config, call.cache.shape.branches
    options = {"phi": call.phi, "branches": branches, "scale": call.scale, "sinks": call.sinks}
    q, gates = call.without_rows_behind(call.q), call.without_rows_behind(call.gates)
    if call.selection is None:
        o = nsa_attention(q, k, v, gates, config, **options, blocks=call.blocks)
    else:
        o, blocks = nsa_attention(q, k, v, gates, config, **options, return_blocks=True)
        call.selection.copy_(blocks)
    call.append()
    note("all", "forward")
    return call.without_rows_behind(o)


def _why_not_forward(call: Call) -> list[str]:
    if call.cache.places.bound():
        return ["needs an empty cache, and a length that no CUDA graph changes"]
    return []


def _prefix(call: Call, note: Note) -> Tensor:
    real = replace(call, q=call.without_rows_behind(call.q))
    return _on_torch(prefix.prefix)(real, note)


def _why_not_prefix(call: Call) -> list[str]:
    branches, reasons = call.cache.shape.branches, []
    if call.cache.places.capturing or torch.compiler.is_compiling():
        reasons.append("the lengths are read by the host, and a CUDA graph has none")
    if "cmp" in branches and "slc" not in branches:
        reasons.append("a cache of the compressed branch alone holds no other keys")
    return reasons


def _for_longer_prompts(call: Call) -> list[str]:
    longer = call.new > call.cache.shape.slack
    return [] if longer else ["for prompts longer than the cache's slack"]


def _triton(call: Call, note: Note) -> Tensor:
    from nsa.kernels.decode import decode

    cache, shape, phi = call.cache, call.cache.shape, call.phi
    q, scale = triton.positive(call.q, call.scale)
    for branch in shape.branches:
        note(branch, "triton")
    return decode(
        q, call.k, call.v, call.gates, **{name: cache.tensors.get(name) for name in NAMES},
        table=cache.table, lengths=cache.lengths, counts=call.counts, config=shape.config,
        phi=phi.kind, phi_key=phi.key, phi_value=phi.value, rotary=phi.rotary,
        branches=shape.branches, scale=scale, sinks=call.sinks,
        given=call.blocks, selection=call.selection,
    )  # fmt: skip


def _why_not_triton(call: Call) -> list[str]:
    shape = call.cache.shape
    reasons = triton.why_not_for(call.q, shape.value_dim)
    if call.new > shape.slack:
        reasons.append(f"takes up to slack={shape.slack} new tokens, got {call.new}")
    if reasons:
        return reasons
    from nsa.kernels.decode import declined

    return declined(shape.config, shape.dim, shape.value_dim, shape.dtype, call.new)


@dataclass(frozen=True)
class Backend:
    """One way to append and attend; `run(call, note)` returns o [B, N, HQ, DV]."""

    run: Callable[[Call, Note], Tensor]
    why_not: Callable[[Call], list[str]] = lambda call: []
    # Reasons why "auto" skips it although it would run.
    not_for_auto: Callable[[Call], list[str]] = lambda call: []


# In order of preference of "auto".
_BACKENDS = {
    # Our kernels: a few launches, for up to `slack` tokens.
    "triton": Backend(_triton, _why_not_triton, lambda call: triton.not_for_auto(call.q)),
    # `nsa_attention` on an empty cache, or behind what a cache holds.
    "forward": Backend(_forward, _why_not_forward, _for_longer_prompts),
    "prefix": Backend(_prefix, _why_not_prefix, _for_longer_prompts),
    "gather": Backend(_on_torch(cached.gather)),
    "masked": Backend(_on_torch(cached.masked)),
    "reference": Backend(_reference),
}


def _choose(name: str, call: Call) -> tuple[str, dict[str, list[str]]]:
    """Return the backend to run, and why "auto" skipped those before it."""
    if name != "auto":
        choice("backend", name, (*_BACKENDS, "auto"))
        if reasons := "; ".join(_BACKENDS[name].why_not(call)):
            raise Declined(f"backend {name!r} does not take this call: {reasons}")
        return name, {}
    declined = {}
    for name, backend in _BACKENDS.items():
        reasons = [*backend.why_not(call), *backend.not_for_auto(call)]
        if not reasons:
            break
        declined[name] = reasons
    return name, declined


def _empty(call: Call) -> Tensor:
    """An empty selection [B, N, HKV, n] int32. ValueError if the cache has no selected branch."""
    shape = call.cache.shape
    if "slc" not in shape.branches:
        raise ValueError(f"return_blocks: a cache of {shape.branches} selects none; 'slc' does")
    slots = *call.q.shape[:2], shape.kv_heads, shape.config.select_count
    return torch.full(slots, -1, dtype=torch.int32, device=call.q.device)


def _checked(q, k, v, gates, cache, config, phi, counts, scale, sinks, blocks) -> Call:
    if not isinstance(cache, LayerCache):
        raise ValueError(f"cache must be a LayerCache, got a {type(cache).__name__}")
    shape = cache.shape
    if config is not None and config != shape.config:
        raise ValueError(f"the cache was made for {shape.config}, and the caller has {config}")
    check_tensor("q", q, "[B, N, HQ, D]")
    if q.ndim != 4 or 0 in q.shape or q.shape[2] % shape.kv_heads:
        raise ValueError(
            f"q must be [B, N, HQ, D] with HQ a multiple of the cache's HKV={shape.kv_heads}, got "
            f"shape {tuple(q.shape)}"
        )
    if (q.shape[0], q.shape[3]) != (shape.batch, shape.dim):
        raise ValueError(
            f"the cache holds B={shape.batch} sequences with D={shape.dim} and q has shape "
            f"{tuple(q.shape)}"
        )
    if q.dtype != shape.dtype:
        raise ValueError(f"q is {q.dtype} and the cache {shape.dtype}; make them equal")
    if q.device != cache.device:
        raise ValueError(f"q is on {q.device} and the cache on {cache.device}")
    for side, x in (("k", k), ("v", v)):
        cache.check_given(side, x, q.shape[1])
    wanted = (*q.shape[:3], 3)
    check_sized("gates", gates, f"[B, N, HQ, 3] = {wanted} in floating point", wanted, *DTYPES)
    check_device("gates", gates, q)
    if counts is not None:
        check_counts(counts, shape.batch)
        check_device("counts", counts, q)
    phi = phi or Phi()
    if shape.raw_ring:
        of_values = shape.value_dim if "cmp" in shape.branches else None
        check_phi(phi, q, shape.kv_heads, of_values, shape.config, shape.capacity)
    scale = shape.dim**-0.5 if scale is None else float(scale)
    if not isfinite(scale):
        raise ValueError(f"scale={scale} must be finite; None stands for D ** -0.5")
    if blocks is not None:
        wanted = *q.shape[:2], shape.kv_heads, shape.config.select_count
        check_sized("blocks", blocks, f"[B, N, HKV, n] = {wanted} in int32", wanted, torch.int32)
        check_device("blocks", blocks, q)
    return Call(q, k, v, gates, cache, phi, counts, scale, checked_sinks(sinks, q), blocks)
