"""triton: our own kernels, forward and backward, bit-repeatable; holds no T x T tensor.

Packed sequences run in one launch, the gated sum is formed inside the kernels, and nothing waits
for the GPU. For tests without a GPU, TRITON_INTERPRET=1 runs the same kernels in the interpreter.
"""

import importlib.util
import math
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.attention.inputs import Inputs
from nsa.attention.registry import Backend, Branches, Compressed, Note
from nsa.attention.span import wide
from nsa.blocks import count_compressed
from nsa.config import NSAConfig
from nsa.reference.compress import PhiWeights
from nsa.reference.nsa import BRANCHES
from nsa.reference.rotary import rotate

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CAPABILITY = (8, 0)
SMALLEST, LARGEST = 16, 256  # head dims
# Read once: torch.compile can trace neither query.
INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GRAIN = 8  # head dims are padded to a multiple: 16 bytes in 16-bit types
# Columns of 16-bit values at least. Of fewer, ptxas (of Triton 3.6 and 3.7, for sm_90) now and then
# takes the address of one part of V from the register of another, and a forward reads elsewhere.
SOUND = 64


def fused(inputs: Inputs, note: Note) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """(gated sum o [B, T, HQ, DV], lse by branch, blocks), packed sequences included."""
    for branch in inputs.branches:
        note(branch, "triton")
    return _attend(inputs, inputs.branches, inputs.gates.flatten(0, 1), compressed(inputs), note)


def run(inputs: Inputs, note: Note) -> Branches:
    """(o [B, T, HQ, DV] with sinks, lse [B, T, HQ] if `return_lse`) of each branch."""
    given = compressed(inputs)
    for branch in inputs.branches:
        note(branch, "triton")
    found = {b: _attend(inputs, (b,), None, given, note) for b in inputs.branches}
    return {b: (o, lse.get(b)) for b, (o, lse, _) in found.items()}


def score(inputs: Inputs, note: Note) -> tuple[Tensor, Compressed]:
    """Blocks [B, T, HKV, n] int32, and (k_cmp, v_cmp) that they are scored by."""
    note("score", "triton")
    given = compressed(inputs)
    with torch.no_grad():
        return select_blocks(inputs, given[0]), given


def select_blocks(inputs: Inputs, k_cmp: Tensor) -> Tensor:
    """The blocks that each query selects: [B, T, HKV, n] int32, scored against k_cmp [B, C, *]."""
    from nsa.kernels import ops
    from nsa.kernels.registration import sizes_of

    q, scale = positive(inputs.q, inputs.scale)
    plain = inputs.cu_seqlens, q.shape[0], sizes_of(inputs.config), scale, *_offset(inputs)
    blocks = ops.select(_flat(_padded(q)), _flat(_padded(k_cmp)), *plain)
    return blocks.unflatten(0, q.shape[:2])


def selected(inputs: Inputs, blocks: Tensor, note: Note) -> tuple[Tensor, None]:
    """(o [B, T, HQ, DV], None) of the selected branch for blocks [B, T, HKV, N]."""
    note("slc", "triton")
    return _attend(inputs, ("slc",), None, (None, None), lambda *_: None, blocks)[0], None


def _attend(
    inputs: Inputs,
    branches: tuple[str, ...],
    gates: Tensor | None,
    given: tuple[Tensor | None, Tensor | None],
    note: Note,
    blocks: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    from nsa.kernels import ops
    from nsa.kernels.registration import sizes_of

    blocks = inputs.blocks if blocks is None else blocks
    scored = "slc" in branches and blocks is None
    if scored:
        note("score", "triton")
    k, v = ({b: side[b] for b in branches if b != "cmp"} for side in (inputs.k, inputs.v))
    k["cmp"] = given[0] if scored or "cmp" in branches else None
    v["cmp"] = given[1] if "cmp" in branches else None
    q, scale = positive(inputs.q, inputs.scale)
    least = SOUND if q.element_size() == 2 else GRAIN
    pairs = [(_padded(k.get(b)), _padded(v.get(b), least)) for b in BRANCHES]
    tensors = [x if x is None else _flat(x) for x in (_padded(q), *sum(pairs, ()))]
    if blocks is not None:
        blocks = blocks.flatten(0, 1).int().contiguous() if "slc" in branches else None
    learned = any(x is not None and x.requires_grad for x in (*tensors, gates, inputs.sinks))
    returned = inputs.return_lse or (inputs.return_blocks and scored)
    keep = (learned and torch.is_grad_enabled()) or returned
    plain = q.shape[0], sizes_of(inputs.config), scale, keep, *_offset(inputs)
    found = ops.attend(*tensors, gates, inputs.sinks, blocks, inputs.cu_seqlens, *plain)
    o = found[0][..., : inputs.value_dim].unflatten(0, q.shape[:2])
    chosen = found[8].unflatten(0, q.shape[:2]) if scored and keep else None
    if not inputs.return_lse:
        return o, {}, chosen
    of_cmp, of_win, of_slc = found[4:7]
    lse2 = {"cmp": of_cmp.t(), "slc": of_slc, "win": of_win.t()}
    return o, {b: (lse2[b] * math.log(2)).unflatten(0, q.shape[:2]) for b in branches}, chosen


def _offset(inputs: Inputs) -> tuple:
    """Last arguments of the operators for queries at an offset: starts, cu_seqlens_q, tokens."""
    if not inputs.offset:
        return ()
    q, tokens = inputs.q, inputs.tokens
    if inputs.cu_seqlens_q is not None:
        return inputs.q_start, inputs.cu_seqlens_q, tokens
    starts = torch.full(q.shape[:1], inputs.q_start, dtype=torch.int32, device=q.device)
    return starts, None, q.shape[0] * tokens


def compressed(inputs: Inputs) -> Compressed:
    """(k_cmp, v_cmp) [B, C, HKV, *], packed ones end to end; None for one not requested."""
    if inputs.compressed is not None:
        return inputs.compressed
    k, v, phi = inputs.k.get("cmp"), inputs.v.get("cmp"), inputs.phi
    if k is None:
        return None, None
    if phi.kind == "mean" and phi.rotary is None:
        return _means(inputs)
    if inputs.cu_seqlens is not None:
        parts = [_of_one_length(x) for x in inputs.sequences(idle=True)]
        k_cmp, v_cmp = zip(*parts, strict=True)
        return torch.cat(k_cmp, 1), None if v is None else torch.cat(v_cmp, 1)
    return _of_one_length(inputs)


def _of_one_length(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    k, v, phi, config = inputs.k["cmp"], inputs.v.get("cmp"), inputs.phi, inputs.config
    if phi.kind == "mean":
        k_cmp, v_cmp = _means(inputs)
    else:
        k_cmp = compress_by_strides(k, phi.kind, phi.key, config)
        v_cmp = None if v is None else compress_by_strides(v, phi.kind, phi.value, config)
    if phi.rotary is not None:
        starts = torch.arange(k_cmp.shape[1], device=k.device) * config.compress_stride
        k_cmp = rotate(k_cmp, *phi.rotary, positions=starts)
    return k_cmp, v_cmp


def _means(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    from nsa.kernels.compress import compress_mean
    from nsa.kernels.registration import sizes_of

    k, v, batch = inputs.k["cmp"], inputs.v.get("cmp"), inputs.q.shape[0]
    values, sizes = None if v is None else _flat(v), sizes_of(inputs.config)
    k_cmp, v_cmp = compress_mean(_flat(k), values, inputs.cu_seqlens, batch, sizes)
    rows = batch, k_cmp.shape[0] // batch
    return k_cmp.unflatten(0, rows), None if v is None else v_cmp.unflatten(0, rows)


def compress_by_strides(x: Tensor, kind: str, weights: PhiWeights, config: NSAConfig) -> Tensor:
    """phi "linear" or "mlp" (Eq. 7): [B, C, HKV, D] of x [B, T, HKV, D], without unfolding x.

    A block is l/d strides of d tokens. Each stride is multiplied once with each of the l/d slabs of
    the weights, and a block sums the products [HIDDEN] of its strides; the position encoding is
    a constant that is multiplied separately.
    """
    count = count_compressed(x.shape[1], config)
    if count == 0:
        return x[:, :0]
    stride, parts = config.compress_stride, config.compress_block // config.compress_stride
    batch, _, heads, dim = x.shape
    strides = count + parts - 1
    rows = x[:, : strides * stride].reshape(batch, strides, stride, heads, dim)
    rows = rows.permute(3, 0, 1, 2, 4).reshape(heads, batch * strides, stride * dim)
    slabs = weights.weight1.unflatten(1, (parts, stride * dim))  # [HKV, l/d, d*D, HIDDEN]
    hidden = weights.position.flatten(1)[:, None] @ weights.weight1  # [HKV, 1, HIDDEN]
    if kind == "mlp":
        hidden = hidden + weights.bias1[:, None]
    hidden = hidden[:, None].to(wide(x.dtype))  # many strides are added up before one rounding
    for part in range(parts):
        product = torch.bmm(rows, slabs[:, part]).unflatten(1, (batch, strides))
        hidden = hidden + product[:, :, part : part + count]
    hidden = hidden.to(x.dtype)
    if kind == "mlp":
        hidden = F.gelu(hidden) @ weights.weight2[:, None] + weights.bias2[:, None, None]
    return hidden.permute(1, 2, 0, 3)


def _flat(x: Tensor) -> Tensor:
    """[B, T, H, D] -> [B*T, H, D], a view where the strides allow it; D is contiguous."""
    x = x.flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """(q, scale) with the same scores and a positive scale, which preserves the maximum."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def _padded(x: Tensor | None, least: int = GRAIN) -> Tensor | None:
    """x zero-padded in its last dimension to at least `least` and a multiple of GRAIN.

    The zeros add nothing to any product.
    """
    missing = 0 if x is None else max(least - x.shape[-1], -x.shape[-1] % GRAIN)
    return F.pad(x, (0, missing)) if missing else x


def why_not(inputs: Inputs) -> list[str]:
    """Reasons why the kernels do not support the inputs."""
    return why_not_for(inputs.q, inputs.value_dim)


def why_not_for(q: Tensor, value_dim: int) -> list[str]:
    """Reasons why no kernel supports q [..., D] and values of that dim."""
    reasons = []
    if not INSTALLED:
        return ["Triton is not installed; pip install 'nsa[triton]'"]
    if q.dtype not in DTYPES:
        reasons.append(f"needs bf16, fp16 or fp32, got {q.dtype}")
    dims = q.shape[3], value_dim
    if min(dims) < SMALLEST or max(dims) > LARGEST:
        reasons.append(f"needs D and DV in {SMALLEST}..{LARGEST}, got {dims[0]} and {dims[1]}")
    if q.is_cuda:
        # torch.compile cannot trace the query; on an older GPU Triton then raises its own error.
        known = not torch.compiler.is_compiling()
        capability = torch.cuda.get_device_capability(q.device) if known else CAPABILITY
        if capability < CAPABILITY:
            name = torch.cuda.get_device_name(q.device)
            oldest = "compute capability 8.0 (Ampere)"
            reasons.append(f"needs {oldest} or newer, {name} has {capability}")
    elif not INTERPRETED:
        reasons.append(f"needs a GPU, got {q.device}; for tests TRITON_INTERPRET=1 runs it there")
    elif NOT_INTERPRETED:
        reasons.append(NOT_INTERPRETED)
    elif q.dtype == torch.bfloat16:
        reasons.append("Triton's interpreter multiplies the bits of bf16; fp32 and fp16 would do")
    return reasons


def first_use(inputs: Inputs) -> None:
    """Raise on a GPU model on which some kernels were never run if they are wrong there."""
    from nsa.kernels.hopper.first_use import check

    check(inputs.q)


def _not_interpreted(triton: str, numpy: str) -> str:
    """Reason why Triton's interpreter would fail on every kernel, "" if it does not."""
    ours, theirs = (tuple(map(int, v.split(".")[:2])) for v in (triton, numpy))
    if ours >= (3, 7) or theirs < (2, 5):
        return ""
    return (
        f"Triton {triton} interprets nothing with NumPy {numpy}, which no longer takes an array of "
        "one for a number; Triton 3.7 or NumPy below 2.5 would do"
    )


NOT_INTERPRETED = ""
if INTERPRETED:
    with suppress(PackageNotFoundError):
        NOT_INTERPRETED = _not_interpreted(version("triton"), version("numpy"))


def not_for_auto(q: Tensor) -> list[str]:
    """Reasons why `auto` skips this backend although it would run."""
    return [] if q.is_cuda else ["interpreted without a GPU, thousands of times slower"]


BACKEND = Backend(
    "triton",
    run,
    summary="our Triton kernels, forward and backward; linear memory, packed sequences in one go",
    quadratic=False,
    why_not=why_not,
    not_for_auto=lambda inputs: not_for_auto(inputs.q),
    fused=fused,
    compress=compressed,
    score=score,
    first_use=first_use,
)
