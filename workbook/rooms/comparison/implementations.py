"""Implementations to compare, in one form: our backends, dense attention and third-party code."""

import contextlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.attention import registry
from nsa.attention.api import nsa_attention
from nsa.attention.inputs import checked
from nsa.reference.nsa import BRANCHES
from whyhung.process import preflight
from workbook.lab.measure.attention_inputs import Drawn
from workbook.lab.measure.shapes import Shape

NSA, DENSE = "nsa_attention", "dense_attention"
LIMITS = {NSA: "limit", DENSE: "dense limit"}  # the names of the physical limits in tables


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention from drawn inputs: call(drawn, blocks) -> o [B, T, HQ, DV].

    blocks [B, T, HKV, n] is None unless `takes_blocks`.
    """

    name: str
    operation: str  # NSA or DENSE: the kind it is compared with
    call: Callable[[Drawn, Tensor | None], Tensor]
    why_not: Callable[[Drawn], list[str]]  # reasons, empty when it runs
    reaches: Callable[[Drawn], list[str]] = lambda drawn: list(drawn.leaves())  # inputs of o
    takes_blocks: bool = False
    other: str = ""  # how its function differs, if it does: its accuracy is not compared
    held_bytes: Callable[[Shape], int] = lambda shape: 0  # T x T tensors, 0 for linear memory
    graph: bool = False  # a CUDA graph can capture it; a failed capture may corrupt the allocator


def of_backends(names: Sequence[str] | None = None) -> list[Implementation]:
    """Our backends, linear-memory ones first; ValueError for an unknown name."""
    if names is not None and not names:
        raise ValueError(f"no backends; name some of {', '.join(registry.names())}")
    known = registry.backends() if names is None else map(registry.get, dict.fromkeys(names))
    return [_backend(b) for b in sorted(known, key=lambda b: (b.quadratic, b.name != "triton"))]


def _backend(backend: registry.Backend) -> Implementation:
    def call(drawn: Drawn, blocks: Tensor | None) -> Tensor:
        return nsa_attention(*_given(drawn), backend=backend.name, blocks=blocks)

    def why_not(drawn: Drawn) -> list[str]:
        rest = dict.fromkeys(("phi", "cu_seqlens", "blocks", "scale")) | {"branches": BRANCHES}
        return backend.why_not(checked(*_given(drawn), **rest))

    held, graph = partial(_held_bytes, backend.name), backend.name == "triton"
    return Implementation(
        backend.name, NSA, call, why_not, takes_blocks=True, held_bytes=held, graph=graph
    )


def _given(drawn: Drawn) -> tuple:
    """Arguments q, k, v, gates and config, in the order of every NSA function."""
    return drawn.q, drawn.k, drawn.v, drawn.gates, drawn.shape.config


def _held_bytes(name: str, shape: Shape) -> int:
    """Bytes of T x T tensors saved for the backward, as counted by `activation_model`."""
    square, size = shape.batch * shape.tokens**2, shape.torch_dtype.itemsize
    stride = shape.config.compress_stride
    if name == "masked":  # fp32 probabilities of three branches and a copy in the dtype of v
        return int(square * shape.heads * (2 + 1 / stride) * (4 + size))
    if name.startswith("sdpa"):  # its masks as an additive bias
        return int(square * shape.group * (shape.kv_heads + 1 + 1 / stride) * size)
    return 0


def free_bytes(device: torch.device) -> int:
    """Bytes still available to a call: on the GPU, or to this process on the host."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = preflight.free_ram()
    return 2**63 if free is None else free  # if the host does not report it, no limit


def operands(drawn: Drawn) -> dict[str, Tensor]:
    """Inputs q, k and v of dense attention by leaf name: the shared ones or the window's."""
    leaves = drawn.leaves()
    return {name: leaves[name] for name in _reaches(drawn)}


def _reaches(drawn: Drawn) -> list[str]:
    return ["q", "k", "v"] if drawn.shape.shared_kv else ["q", "k_win", "v_win"]


def _sdpa(backend: SDPBackend, drawn: Drawn, blocks: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in operands(drawn).values())
    with sdpa_kernel([backend]):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.transpose(1, 2)


def _fa4(drawn: Drawn, blocks: Tensor | None) -> Tensor:
    from flash_attn.cute import flash_attn_func

    o = flash_attn_func(*operands(drawn).values(), causal=True)
    return o[0] if isinstance(o, tuple) else o  # some releases return the lse, too


def _fla(drawn: Drawn, blocks: Tensor | None) -> Tensor:
    from fla.ops.nsa import parallel_nsa

    g_cmp, g_slc, _ = (g.contiguous() for g in drawn.gates.unbind(-1))
    config = drawn.shape.config
    sizes = {"block_counts": config.select_count, "block_size": config.select_block}
    return parallel_nsa(drawn.q, drawn.k, drawn.v, g_cmp, g_slc, **sizes)


def _why_not_fla(drawn: Drawn) -> list[str]:
    if not find_spec("fla"):
        return ["fla-core is not installed; pip install fla-core"]
    group = drawn.shape.group
    reasons = [] if drawn.q.is_cuda else [f"needs a GPU, got {drawn.q.device}"]
    if group < 16 or group & (group - 1):
        reasons.append(f"needs a power of two of at least 16 query heads a KV head, got {group}")
    if not drawn.shape.shared_kv:
        reasons.append("takes one k and v for all branches")
    return reasons


def _why_not_dense(name: str, drawn: Drawn) -> list[str]:
    q, dim, value_dim = drawn.q, drawn.shape.dim, drawn.shape.value_dim
    if name == "fa4" and not (find_spec("flash_attn") and find_spec("flash_attn.cute")):
        return ["flash-attn-4 is not installed; pip install 'nsa[flash-attn]'"]
    if name != "flash" and not q.is_cuda:
        return [f"needs a GPU, got {q.device}"]
    reasons = []
    if q.is_cuda and q.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"needs bf16 or fp16, got {q.dtype}")
    if name == "fa4" and (capability := torch.cuda.get_device_capability(q.device)) < (9, 0):
        reasons.append(f"needs compute capability 9.0 (Hopper) or newer, got {capability}")
    if name != "cudnn" and dim != value_dim:  # fa4's grouped heads have no backward otherwise
        reasons.append(f"needs D = DV, got {dim} and {value_dim}")
    return reasons


OTHER = "fla-core compresses with l = d = l' and runs here without a window"
FLA = Implementation("fla", NSA, _fla, _why_not_fla, other=OTHER)  # fla-core's `parallel_nsa`
# torch's FlashAttention-2, cuDNN by way of torch, and flash-attn-4
DENSE_ATTENTIONS = tuple(
    Implementation(
        f"dense-{name}", DENSE, call, partial(_why_not_dense, name), _reaches, graph=True
    )
    for name, call in (
        ("flash", partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
        ("cudnn", partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
        ("fa4", _fa4),
    )
)


def peer(path: str) -> Implementation:
    """Wrap the callable at "import.path:function": f(q, k, v, gates, config) -> o [B, T, HQ, DV].

    k and v are tensors, or mappings by branch if the shape has one per branch. An invalid path or
    signature becomes a reason in `why_not`, so that the rest of a table survives.
    """
    function, wrong = _found(path)

    def call(drawn: Drawn, blocks: Tensor | None) -> Tensor:
        o = function(*_given(drawn))
        wanted = (*drawn.q.shape[:3], drawn.shape.value_dim)
        got = tuple(o.shape) if isinstance(o, Tensor) else type(o).__name__
        if got != wanted:
            raise ValueError(f"{path} must return o [B, T, HQ, DV] = {wanted}, got {got}")
        if o.dtype != drawn.q.dtype:
            raise ValueError(f"{path} must return {drawn.q.dtype} as q is, got {o.dtype}")
        return o

    return Implementation(f"peer {path}", NSA, call, lambda drawn: list(wrong))


def all_implementations(
    backends: Sequence[str] | None = None, peers: Sequence[str] = (), with_dense: bool = True
) -> list[Implementation]:
    """Backends (None: all), dense attention, fla-core and peers; T x T tensors come last."""
    ours = of_backends(backends)
    first = [i for i in ours if i.name in ("triton", "flash")]
    dense = DENSE_ATTENTIONS if with_dense else ()
    theirs = [*dense, FLA, *map(peer, peers)]
    return [*first, *theirs, *(i for i in ours if i not in first)]


def wrong_paths(paths: Sequence[str]) -> list[str]:
    """Reasons why any of these paths is not callable; each is imported to find out."""
    return [reason for path in paths for reason in _found(path)[1]]


def _found(path: str) -> tuple[Callable | None, list[str]]:
    """Return (the callable, reasons why it cannot be called)."""
    module, _, name = path.partition(":")
    if not (module and name):
        return None, [f"{path!r} is not of the form import.path:function"]
    try:
        function = pkgutil.resolve_name(path)
    except AttributeError:
        return None, [f"module {module} has no {name!r}"]
    except (Exception, SystemExit) as error:  # third-party modules may raise anything
        return None, [f"{module} cannot be imported: {type(error).__name__}: {error}"]
    if not callable(function):
        return None, [f"{path} is no function but {type(function).__name__}"]
    with contextlib.suppress(ValueError):  # a builtin has no signature; the call will tell
        signature = inspect.signature(function)
        try:
            signature.bind(*range(5))
        except TypeError as error:
            return None, [f"{path}{signature} does not take (q, k, v, gates, config): {error}"]
    return function, []
