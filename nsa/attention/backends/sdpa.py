"""sdpa: torch's scaled_dot_product_attention with an explicit mask.

Holds a T x T boolean mask for every head of a group and every branch (times the KV heads for the
selected branch); where no fused kernel accepts a mask, torch itself holds T x T scores for every
head as well. Torch chooses among its kernels; "sdpa:math" and the like use that one or decline.
None of them returns a log-sum-exp: return_lse or sinks recompute the scores, T x T.
"""

import warnings
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.attention import transforms
from nsa.attention.branches import visible_by_branch
from nsa.attention.inputs import Inputs
from nsa.attention.registry import Backend, Branches, Declined, Note
from nsa.reference.attend import log_sum_exp

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_NAMES = {int(backend.value): name for name, backend in KERNELS.items()}


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, kernel: str = "", **options
) -> tuple[Tensor, str]:
    """(o, "sdpa:KERNEL") of torch's function of that name, q [B, H, T, D]: by torch's choice, or by
    that kernel of KERNELS. Raises Declined if torch has no such kernel for these inputs."""
    if torch.compiler.is_compiling():  # it cannot trace the query, and the result is unused
        with sdpa_kernel(KERNELS[kernel]) if kernel else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, **options), "sdpa"
    if transforms.active():  # the fused kernels have neither jvp, vmap nor a second derivative
        if kernel not in ("", "math"):
            raise Declined(f"torch.func needs sdpa's math kernel, not {kernel}; 'sdpa' takes it")
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, **options), "sdpa:math"
    if not kernel:
        served = _choice(q, k, v, **options)
        return F.scaled_dot_product_attention(q, k, v, **options), f"sdpa:{served}"
    with sdpa_kernel(KERNELS[kernel]), warnings.catch_warnings(record=True) as reasons:
        try:
            served = _choice(q, k, v, **options)
        except (RuntimeError, UserWarning) as error:
            why = "; ".join(str(reason.message) for reason in reasons) or str(error)
            raise Declined(
                f"torch has no {kernel} kernel for q {list(q.shape)} {q.dtype} and v "
                f"{list(v.shape)} on {q.device.type}: {why}"
            ) from error
        return F.scaled_dot_product_attention(q, k, v, **options), f"sdpa:{served}"


def _choice(q: Tensor, k: Tensor, v: Tensor, **options) -> str:
    """Kernel that torch chooses for this call, by the same function that torch uses."""
    choice = int(torch._fused_sdp_choice(q, k, v, **options))
    return _NAMES.get(choice, f"kernel {choice}")


def run(inputs: Inputs, note: Note, kernel: str = "") -> Branches:
    """(o [B, T, HQ, DV], lse) of each branch."""
    outputs = {}
    for branch, k, v, visible in visible_by_branch(inputs, note):
        o, served = _attend(inputs, k, v, visible, kernel)
        needed = inputs.needs_lse
        outputs[branch] = o, log_sum_exp(inputs.q, k, visible, inputs.scale) if needed else None
        note(branch, served)
    return outputs


def _attend(
    inputs: Inputs, k: Tensor, v: Tensor, visible: Tensor, kernel: str
) -> tuple[Tensor, str]:
    q, group = inputs.q, inputs.group
    batch, tokens, heads, _ = q.shape
    if k.shape[1] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3]), "no-keys"
    seen = visible.any(-1, keepdim=True)  # [B or 1, HKV or 1, T, 1]
    # A row without keys attends to all of them, which is finite, and is then set to 0.
    mask = (visible | ~seen).repeat(1, 1, group, 1)
    # The heads of a group as further rows of one head: K and V are not repeated, their gradients
    # not rounded head by head, and torch's memory-efficient kernel takes the mask.
    rows = q.reshape(batch, tokens, -1, group, q.shape[3]).permute(0, 2, 3, 1, 4).flatten(2, 3)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    o, served = scaled_dot_product_attention(rows, k, v, kernel, attn_mask=mask, scale=inputs.scale)
    o = torch.where(seen.repeat(1, 1, group, 1), o, 0.0)
    o = o.unflatten(2, (group, tokens)).permute(0, 3, 1, 2, 4)  # [B, T, HKV, G, DV]
    return o.reshape(batch, tokens, heads, -1), served


def _why_not(kernel: str, inputs: Inputs) -> list[str]:
    """Reasons why the kernel declines, tried on eight tokens of the same dims, dtype and device."""
    if torch.compiler.is_compiling():
        return []
    learns = torch.is_grad_enabled() and inputs.q.requires_grad
    few = [
        inputs.q.new_zeros(1, inputs.kv_heads, 8, dim).requires_grad_(learns)
        for dim in (inputs.q.shape[3], inputs.q.shape[3], inputs.value_dim)
    ]
    mask = torch.ones(1, inputs.kv_heads, 8, 8, dtype=torch.bool, device=inputs.q.device)
    try:
        scaled_dot_product_attention(*few, kernel, attn_mask=mask, scale=inputs.scale)
    except Declined as refusal:
        return [str(refusal)]
    return []


BACKEND = Backend(
    "sdpa",
    run,
    summary="torch's scaled_dot_product_attention under a mask; T x T masks",
    quadratic=True,
    transforms=transforms.ALL,
)
VARIANTS = [
    Backend(
        f"sdpa:{kernel}",
        partial(run, kernel=kernel),
        summary=f"sdpa by torch's {kernel} kernel",
        quadratic=True,
        why_not=partial(_why_not, kernel),
    )
    for kernel in KERNELS
]
