"""NSA as a layer: projections per branch, rotary, phi, gates and attention."""

from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nsa.attention import registry
from nsa.attention.api import nsa_attention
from nsa.attention.cache import LayerCache
from nsa.attention.decode import nsa_decode
from nsa.attention.transforms import autocast_dtype
from nsa.config import NSAConfig
from nsa.model.config import ModelConfig, check_int
from nsa.model.names import rename_on_load
from nsa.model.phi import LEARNED_PHI
from nsa.model.projections import Projections, draw, is_plain
from nsa.model.rotary import Rotary, rotary_after, rotary_for
from nsa.parallel.attention import context_parallel_attention
from nsa.parallel.mesh import ContextParallel
from nsa.reference.compress import Phi
from nsa.reference.gate import sigmoid_gates, softmax_gates
from nsa.reference.nsa import BRANCHES
from nsa.spelling import nearest

# Fields of ModelConfig that a layer uses besides its sizes; `layers` scales the first o_proj.
OPTIONS = (
    *("head_dim", "value_dim", "layers", "phi", "gate", "gate_temperature", "gate_init"),
    *("compress_rope", "shared_kv", "force_branch", "stopgrad_gates", "sinks", "backend"),
    *("strict", "rope_base", "rope_scale"),
)


def layer_config(
    dim: int,
    heads: int | None,
    kv_heads: int | None = None,
    config: NSAConfig | None = None,
    **options: Any,
) -> ModelConfig:
    """Config of one layer for use in any other model; see NSAAttention. ValueError for an unknown
    option and for sizes that do not fit."""
    for name in options:
        if name not in OPTIONS:
            theirs = {field.name for field in fields(NSAConfig)}
            hint = f"config=NSAConfig({name}=...) has it" if name in theirs else None
            hint = hint or nearest(name, (*OPTIONS, "dim", "heads", "kv_heads", "config"))
            raise ValueError(f"NSAAttention has no option {name!r}; {hint}")
    if heads is None:
        raise ValueError(f"NSAAttention(dim={dim!r}) needs heads as well, as NSAAttention(256, 8)")
    for name, value in (("dim", dim), ("heads", heads)):
        check_int(name, value)
    if options.get("head_dim") is None:
        if dim % heads:
            divisors = ", ".join(str(n) for n in range(1, dim + 1) if dim % n == 0)
            raise ValueError(
                f"dim={dim} is not a multiple of heads={heads}; heads may be {divisors}, or "
                "head_dim says how wide a head is"
            )
        options["head_dim"] = dim // heads
    sizes = {"dim": dim, "heads": heads, "kv_heads": heads if kv_heads is None else kv_heads}
    nsa = NSAConfig() if config is None else config
    return ModelConfig(**{"name": "layer", "layers": 1, **sizes, "nsa": nsa, **options})


class NSAAttention(nn.Module):
    """Hidden states to hidden states through the three gated branches; projections have no bias.

    NSAAttention(256, 8, 2, NSAConfig(window=128), backend="triton") replaces the attention of any
    causal model: width 256, 8 query and 2 KV heads (as many as query heads by default), and any of
    OPTIONS. A model of this package passes only its ModelConfig.

    Each branch has its own k and v projection (section 3.3.3), or all share one (`shared_kv`).
    Queries are rotated, and keys too, but for k_cmp with compress_rope="after". The gate is an MLP
    whose hidden width is head_dim // 2, of the hidden state ("sigmoid") or of the rotated mean
    query of each group ("softmax"); "linear" is one matrix without bias and then a sigmoid, as in
    flash-linear-attention; "uniform" is the constant 1/3 and has no parameters.

    With sinks="learned" the parameter `sinks` [HQ * 3], in the order of the gates, has a logit
    without a key or a value for each head and branch, which may then attend to nothing (see
    `nsa_attention`). They start at 0, as if one more key scored 0, and have one dimension, so that
    they do not decay.

    Parameters without a gradient by design: the gate's with `force_branch` (it is the constant 1)
    or `stopgrad_gates`; with `force_branch` also the other branches' projections and phi, which are
    not applied. For "slc" k_cmp and phi still score the blocks, and scoring has no gradient.

    Raises ValueError for a backend that is not in the registry, and for sizes and options that do
    not fit.
    """

    def __init__(
        self,
        dim: int | ModelConfig,
        heads: int | None = None,
        kv_heads: int | None = None,
        config: NSAConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(dim, ModelConfig):
            config = layer_config(dim, heads, kv_heads, config, **options)
        elif options or any(x is not None for x in (heads, kv_heads, config)):
            raise ValueError("a ModelConfig has all sizes; change it by its with_(heads=8)")
        else:
            config = dim
        registry.check_name(config.backend)
        self.config = config
        self.share_sequences(None)
        dim, heads, kv_heads = config.dim, config.heads, config.kv_heads
        self.q_proj = nn.Linear(dim, heads * config.head_dim, bias=False)
        if config.shared_kv:
            self.k_proj, self.v_proj = self._keys_and_values()
        else:
            for branch in BRANCHES:
                key, value = self._keys_and_values()
                self.add_module(branch, nn.ModuleDict({"k_proj": key, "v_proj": value}))
        self.o_proj = nn.Linear(heads * config.value_size, dim, bias=False)
        if config.gate == "linear":
            self.gate2 = nn.Linear(dim, 3 * heads, bias=False)
        elif config.gate != "uniform":
            per_group = config.gate == "softmax"
            self.gate1 = nn.Linear(config.head_dim if per_group else dim, config.head_dim // 2)
            self.gate2 = nn.Linear(config.head_dim // 2, 3 if per_group else 3 * heads)
        if config.phi in LEARNED_PHI:
            make, block = LEARNED_PHI[config.phi], config.nsa.compress_block
            self.phi_key = make(kv_heads, block, config.head_dim)
            self.phi_value = make(kv_heads, block, config.value_size)
        learned = config.sinks == "learned"
        self.sinks = nn.Parameter(torch.empty(3 * heads)) if learned else None
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(rename_on_load)

    def _keys_and_values(self) -> tuple[nn.Linear, nn.Linear]:
        config = self.config
        widths = (config.kv_heads * size for size in (config.head_dim, config.value_size))
        return tuple(nn.Linear(config.dim, width, bias=False) for width in widths)

    def linears(self) -> dict[str, nn.Module]:
        """Projections that read x: `q`, `k SOURCE` and `v SOURCE`; a source is a branch, or
        `shared`."""
        found = {"q": self.q_proj}
        for kind in "kv":
            if self.config.shared_kv:
                found[f"{kind} shared"] = getattr(self, f"{kind}_proj")
            else:
                found |= {f"{kind} {b}": getattr(self, b)[f"{kind}_proj"] for b in BRANCHES}
        return found

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """The gate's first matrix is Xavier-uniform, its last one with gain 0.1, its biases are 0:
        all gates start near sigmoid(0) = 1/2 or near 1/3. With gate_init="zero" the last matrix is
        0 and they start there exactly; the first one then has no gradient in the first step."""
        draw(self.linears().values(), self.o_proj, self.config.layers, generator)
        gains = {"gate1": 1.0, "gate2": 0.0 if self.config.gate_init == "zero" else 0.1}
        for name, linear in self.named_children():
            if name in gains:
                nn.init.xavier_uniform_(linear.weight, gain=gains[name], generator=generator)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        if self.config.phi in LEARNED_PHI:
            self.phi_key.reset_parameters(generator)
            self.phi_value.reset_parameters(generator)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        x: Float[Tensor, "B T E"],
        rotary: Rotary | None = None,
        cu_seqlens: Int[Tensor, " N1"] | None = None,
        cache: LayerCache | None = None,
        counts: Int[Tensor, " B"] | None = None,
        *,
        decode: str = "auto",
        advance: bool = True,
        blocks: Int[Tensor, "B T HKV N"] | None = None,
        return_blocks: bool = False,
    ) -> Float[Tensor, "B T E"] | tuple[Tensor, Tensor]:
        """Attention over B sequences of T tokens, or over packed ones (B = 1) with `cu_seqlens`.
        `rotary` has tables shared by all layers; by default they are computed here. With `context`
        set, x has this rank's rows of sequences on several ranks, and `cu_seqlens` are of all.

        With a `cache`, x holds the next T tokens of each sequence in it, the first counts[b] of
        them real, and they are appended; no gradient flows. More than `slack` tokens into an empty
        cache use this layer's own backend, all others use `decode`, see `nsa_decode`.
        `advance` False leaves the lengths to the model, whose layers share them.

        `blocks` are a selection to use instead of this layer's own, and `return_blocks` adds the
        one that was used to the result, both as in `nsa_attention`.
        """
        if rotary is not None and not isinstance(rotary, Rotary):
            raise TypeError(
                f"rotary is a {type(rotary).__name__} and must be a nsa.model.rotary.Rotary or "
                "None, and cu_seqlens the borders [N + 1] of packed sequences or None; queries, "
                "keys and values are all made of x: layer(x)"
            )
        rotary = None if rotary is None else rotary.to(x.device)
        shared = {"blocks": blocks, "return_blocks": return_blocks}
        if cache is not None:
            if cu_seqlens is not None:
                raise ValueError(
                    "a cache keeps sequences side by side: give x as [B, T, E] with counts, and no "
                    "cu_seqlens"
                )
            o = self._from_cache(x, rotary, cache, counts, decode, advance, shared)
        else:
            arguments = self.arguments(x, rotary, cu_seqlens, **shared)
            arguments |= {"backend": self.config.backend, "strict": self.config.strict}
            if self.context is None:
                o = nsa_attention(**arguments)
            else:
                o = self._attend_shared(**arguments, context=self.context)
        if return_blocks:
            o, blocks = o
            return self.o_proj(o.flatten(2)), blocks
        return self.o_proj(o.flatten(2))

    def share_sequences(self, context: ContextParallel | None) -> None:
        """Take x as this rank's rows of sequences on the ranks of `context`; None: whole ones."""
        self.context = context
        if context is not None:  # what is sent beside other work cannot be traced
            self._attend_shared = torch.compiler.disable(context_parallel_attention)

    def _from_cache(
        self,
        x: Tensor,
        rotary: Rotary | None,
        cache: LayerCache,
        counts: Tensor | None,
        decode: str,
        advance: bool,
        shared: dict[str, Any],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """o [B, T, HQ, DV] of the next T tokens, and the blocks if they are to be returned."""
        config, shape = self.config, cache.shape
        if self.context is not None:
            raise ValueError("a cache keeps whole sequences, and this layer's are on several ranks")
        branches = (config.force_branch,) if config.force_branch else BRANCHES
        if shape.branches != branches:
            raise ValueError(f"the cache keeps {shape.branches} and the layer computes {branches}")
        if x.shape[0] != shape.batch:
            raise ValueError(f"x is of {x.shape[0]} sequences and the cache of {shape.batch}")
        rotary = rotary or rotary_after(config, cache.lengths, shape.capacity, x.shape[1])
        given = self.arguments(x, rotary, **shared)
        del given["cu_seqlens"], given["branches"]
        if cache.longest or x.shape[1] <= shape.slack:
            options = {"backend": decode, "strict": config.strict, "advance": advance}
            return nsa_decode(cache=cache, counts=counts, **given, **options)
        new = {side: given[side] for side in "kv"}
        for side, tensors in new.items():
            cache.check_given(side, tensors)
        cache.places.room(x.shape[1], counts)
        options = {"backend": config.backend, "strict": config.strict, "branches": branches}
        with torch.no_grad():
            o = nsa_attention(**given, **options)
        cache.append(**new, phi=given["phi"], counts=counts, advance=advance)
        return o

    def arguments(
        self,
        x: Float[Tensor, "B T E"],
        rotary: Rotary | None = None,
        cu_seqlens: Int[Tensor, " N1"] | None = None,
        *,
        blocks: Int[Tensor, "B T HKV N"] | None = None,
        return_blocks: bool = False,
    ) -> dict[str, Any]:
        """Arguments of `nsa_attention` for input x, except `backend` and `strict`."""
        config = self.config
        if x.ndim != 3 or x.shape[2] != config.dim:
            raise ValueError(f"x must be [B, T, {config.dim}], got shape {tuple(x.shape)}")
        self._check_dtype(x)
        rotary = rotary or rotary_for(config, x.shape[1], x.device, cu_seqlens, self.context)
        branches = (config.force_branch,) if config.force_branch else BRANCHES
        projections = self.projections(x, branches)
        q, k = self.queries_and_keys(projections, rotary, branches)
        v = self.values(projections, branches)
        with torch.set_grad_enabled(torch.is_grad_enabled() and config.force_branch != "slc"):
            phi = None if config.force_branch == "win" else self.phi(q.dtype, rotary)
        chosen = {"config": config.nsa, "phi": phi, "cu_seqlens": cu_seqlens, "branches": branches}
        if self.sinks is not None:
            chosen["sinks"] = self.sinks.view(-1, 3)
        if blocks is not None:
            chosen["blocks"] = blocks
        if return_blocks:
            chosen["return_blocks"] = True
        return {"q": q, "k": k, "v": v, "gates": self.gates(x, q), **chosen}

    def _check_dtype(self, x: Tensor) -> None:
        """Raise ValueError if x and the weights differ in dtype and nothing casts either of them. A
        replacement of a linear layer may compute in any dtype."""
        if not is_plain(self.q_proj) or type(self.q_proj.weight) is not nn.Parameter:
            return
        held = self.q_proj.weight.dtype
        if x.dtype != held and held.is_floating_point and autocast_dtype(x.device) is None:
            raise ValueError(
                f"x is {x.dtype} and the layer's weights are {held}; layer.to(x.dtype), "
                "x.to(weight.dtype) or torch.autocast makes them agree"
            )

    def projections(self, x: Float[Tensor, "B T E"], branches: tuple[str, ...]) -> Projections:
        """`q`, `k SOURCE` and `v SOURCE`, not rotated; a source is a branch, or `shared`."""
        sources = ("shared",) if self.config.shared_kv else branches
        together = ["q", *(f"{kind} {source}" for kind in "kv" for source in sources)]
        return Projections(x, self.linears(), together)

    def queries_and_keys(
        self, projections: Projections, rotary: Rotary, branches: tuple[str, ...]
    ) -> tuple[Float[Tensor, "B T HQ D"], dict[str, Float[Tensor, "B T HKV D"]]]:
        """Queries and the keys of these branches, rotated together.

        Keys shared by branches are projected and rotated once. For "slc" alone also the keys of
        "cmp", which score its blocks, without gradient.
        """
        config = self.config
        needed = (*branches, "cmp") if branches == ("slc",) else branches
        before = config.compress_rope == "before"
        turns = [b for b in needed if b != "cmp" or before]

        def source(branch: str) -> str:
            return "shared" if config.shared_kv else branch

        trained = set(map(source, branches))

        def plain(name: str) -> Tensor:
            with torch.set_grad_enabled(torch.is_grad_enabled() and name in trained):
                return projections[f"k {name}"].unflatten(-1, (config.kv_heads, config.head_dim))

        q = projections["q"].unflatten(-1, (config.heads, config.head_dim))
        keys = {name: plain(name) for name in dict.fromkeys(map(source, needed))}
        names = list(dict.fromkeys(map(source, turns)))
        q, *turned = rotary(q, *(keys[name] for name in names))
        turned = dict(zip(names, turned, strict=True))
        found = {b: (turned if b in turns else keys)[source(b)] for b in needed}
        if needed != branches:
            found["cmp"] = found["cmp"].detach()
        return q, found

    def values(
        self, projections: Projections, branches: tuple[str, ...]
    ) -> dict[str, Float[Tensor, "B T HKV DV"]]:
        """Values of these branches."""
        shape = (self.config.kv_heads, self.config.value_size)
        if self.config.shared_kv:
            return dict.fromkeys(branches, projections["v shared"].unflatten(-1, shape))
        return {name: projections[f"v {name}"].unflatten(-1, shape) for name in branches}

    def phi(self, dtype: torch.dtype, rotary: Rotary) -> Phi:
        """Phi with this layer's parameters, which computes compressed keys and values."""
        after = self.config.compress_rope == "after"
        tables = (rotary.cos, rotary.sin) if after else None
        if self.config.phi == "mean":
            return Phi(rotary=tables)
        key, value = self.phi_key(dtype), self.phi_value(dtype)
        return Phi(self.config.phi, key, value, tables)

    def gates(
        self, x: Float[Tensor, "B T E"], q: Float[Tensor, "B T HQ D"]
    ) -> Float[Tensor, "B T HQ 3"]:
        """g_cmp, g_slc, g_win of each token and query head (Eq. 5)."""
        config = self.config
        if config.force_branch:
            index = torch.arange(len(BRANCHES), device=q.device)
            one_hot = (index == BRANCHES.index(config.force_branch)).to(q.dtype)
            return one_hot.expand(*q.shape[:-1], 3)
        if config.gate == "uniform":
            return q.new_full((), 1 / 3).expand(*q.shape[:-1], 3)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not config.stopgrad_gates):
            if config.gate == "softmax":
                gates = softmax_gates(
                    q, config.kv_heads, self.gate1, self.gate2, config.gate_temperature
                )
            else:
                first = None if config.gate == "linear" else self.gate1
                gates = sigmoid_gates(x, first, self.gate2, config.gate_temperature)
            return gates.to(q.dtype)
