"""The dense baseline of the NSA layer: causal attention over every earlier token."""

from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.attention import dense, witness
from nsa.attention.backends.sdpa import KERNELS, scaled_dot_product_attention
from nsa.attention.placing import sequence_bounds
from nsa.attention.registry import Declined
from nsa.model.config import ModelConfig
from nsa.model.names import rename_on_load
from nsa.model.projections import Projections, draw
from nsa.model.rotary import Rotary, rotary_for
from nsa.spelling import nearest

BACKENDS = ("auto", "sdpa", *(f"sdpa:{kernel}" for kernel in KERNELS), "flash")


class DenseAttention(nn.Module):
    """Hidden states to hidden states; heads, KV heads, rotary and projections as in NSAAttention.

    One k and one v projection instead of NSA's three, and no gates: at the same width it has fewer
    parameters. See `presets.dense_twin`.

    backend: "sdpa", torch's scaled_dot_product_attention, or "sdpa:math" and the like for one of
    its kernels; "flash", flash-attn, which runs or raises Declined; "auto", flash-attn if it
    accepts the inputs, else "sdpa".

    Raises ValueError for any other backend.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.backend not in BACKENDS:
            hint = nearest(config.backend, BACKENDS)
            raise ValueError(f"backend={config.backend!r} is none of dense attention; {hint}")
        self.config = config
        dim, heads, kv_heads = config.dim, config.heads, config.kv_heads
        self.q_proj = nn.Linear(dim, heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * config.value_size, bias=False)
        self.o_proj = nn.Linear(heads * config.value_size, dim, bias=False)
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(rename_on_load)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        inner = (self.q_proj, self.k_proj, self.v_proj)
        draw(inner, self.o_proj, self.config.layers, generator)

    def forward(
        self,
        x: Float[Tensor, "B T E"],
        rotary: Rotary | None = None,
        cu_seqlens: Int[Tensor, " N1"] | None = None,
    ) -> Float[Tensor, "B T E"]:
        """Attention over B sequences of T tokens, or over packed ones (B = 1) with `cu_seqlens`.

        Packed sequences are computed one after the other, so the host reads their bounds: a sync.
        """
        q, k, v = self.queries_keys_values(x, rotary, cu_seqlens)
        o, served, declined = self._attend(q, k, v, cu_seqlens)
        if not torch.compiler.is_compiling():
            witness.saw_call("dense", [("dense", served)], declined)
            witness.saw_output(o)
        if self.config.strict and not bool(o.isfinite().all()):
            raise FloatingPointError(
                f"dense attention at {witness.place()}: {int((~o.isfinite()).sum())} of "
                f"{o.numel()} values are not finite (backend {served})"
            )
        return self.o_proj(o.flatten(2))

    def queries_keys_values(
        self,
        x: Float[Tensor, "B T E"],
        rotary: Rotary | None = None,
        cu_seqlens: Int[Tensor, " N1"] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, HQ, D] and k [B, T, HKV, D], rotated, and v [B, T, HKV, DV]."""
        config = self.config
        rotary = rotary or rotary_for(config, x.shape[1], x.device, cu_seqlens)
        made = Projections(x, {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj})
        q, k = rotary(
            made["q"].unflatten(-1, (config.heads, config.head_dim)),
            made["k"].unflatten(-1, (config.kv_heads, config.head_dim)),
        )
        return q, k, made["v"].unflatten(-1, (config.kv_heads, config.value_size))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None):
        """(o [B, T, HQ, DV], name of the implementation, reasons why others declined)."""
        attend, declined = self._implementation(q)
        if cu_seqlens is None:
            return *attend(q, k, v), declined
        bounds = sequence_bounds(cu_seqlens, q)
        if not bounds:
            raise Declined(
                "dense attention takes packed sequences one by one, whose borders the host cannot "
                "read while torch.compile traces or a CUDA graph is captured; attention='nsa' can"
            )
        outputs = []
        for start, end in pairwise(bounds):
            if start < end:
                rows = slice(start, end)
                o, served = attend(q[:, rows], k[:, rows], v[:, rows])
                outputs.append(o)
        return torch.cat(outputs, dim=1), served, declined

    def _implementation(self, q: Tensor):
        """`sdpa` or flash-attn, and why "auto" skipped the latter. Raises Declined if "flash" was
        named and does not support the inputs."""
        name, scale = self.config.backend, self.config.head_dim**-0.5
        if name.startswith("sdpa"):
            return partial(sdpa, kernel=name.partition(":")[2]), {}
        reasons = dense.why_not(q, self.config.value_size, scale)
        if not reasons:
            return partial(dense.dense_attention, scale=scale), {}
        if name == "auto":
            return sdpa, {"flash": reasons}
        raise Declined(f"backend 'flash' does not take these inputs: {'; '.join(reasons)}")


def sdpa(
    q: Float[Tensor, "B T HQ D"],
    k: Float[Tensor, "B T HKV D"],
    v: Float[Tensor, "B T HKV DV"],
    kernel: str = "",
) -> tuple[Float[Tensor, "B T HQ DV"], str]:
    """(o, "sdpa:KERNEL"): torch's causal attention, K and V not repeated for the heads of a group.

    In bf16 it sums a group's K and V gradients in bf16, with about twice the error of one head's
    (docs/log.md has the numbers). If D and DV differ, both are padded to the larger, because
    torch's fused kernels do not support that and its fallback holds T x T scores.
    """
    scale, value_dim = q.shape[3] ** -0.5, v.shape[3]
    width = max(q.shape[3], value_dim)
    q, k, v = (x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3])) for x in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = {"is_causal": True, "scale": scale, "enable_gqa": grouped}
    o, served = scaled_dot_product_attention(q, k, v, kernel, **options)
    return o.transpose(1, 2)[..., :value_dim], served
