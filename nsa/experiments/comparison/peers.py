"""Other people's NSA in the same table: fla-core from PyPI, and any callable by its import path."""

import importlib
import importlib.util
import inspect
from collections.abc import Sequence

from torch import Tensor

from nsa.experiments.comparison.implementations import NSA, Implementation
from nsa.lab.measure.attention_inputs import Drawn


def fla() -> Implementation:
    """fla-core's `parallel_nsa`: mean pooling over blocks that do not overlap, and no window."""
    return Implementation(
        "fla",
        NSA,
        _fla,
        _why_not_fla,
        other="fla-core compresses with l = d = l' and runs here without a window",
    )


def _fla(drawn: Drawn, blocks: Tensor | None) -> Tensor:
    from fla.ops.nsa import parallel_nsa

    g_cmp, g_slc, _ = (g.contiguous() for g in drawn.gates.unbind(-1))
    config = drawn.shape.config
    return parallel_nsa(
        drawn.q, drawn.k, drawn.v, g_cmp, g_slc,
        block_counts=config.select_count, block_size=config.select_block,
    )  # fmt: skip


def _why_not_fla(drawn: Drawn) -> list[str]:
    if importlib.util.find_spec("fla") is None:
        return ["fla-core is not installed; pip install fla-core"]
    reasons = [] if drawn.q.is_cuda else [f"needs a GPU, got {drawn.q.device}"]
    group = drawn.shape.group
    if group < 16 or group & (group - 1):
        reasons.append(f"needs a power of two of at least 16 query heads a KV head, got {group}")
    if not drawn.shape.shared_kv:
        reasons.append("takes one k and v for all branches")
    return reasons


def peer(path: str) -> Implementation:
    """The callable at "import.path:function": f(q, k, v, gates, config) -> o [B, T, HQ, DV].

    k and v are tensors, or mappings by branch where a shape has one each. A path that leads nowhere
    or a signature that does not fit is a reason of `why_not`, so that the rest of a table survives.
    """
    function, wrong = _found(path)

    def call(drawn: Drawn, blocks: Tensor | None) -> Tensor:
        o = function(drawn.q, drawn.k, drawn.v, drawn.gates, drawn.shape.config)
        wanted = (*drawn.q.shape[:3], drawn.shape.value_dim)
        if not isinstance(o, Tensor) or o.shape != wanted:
            got = tuple(o.shape) if isinstance(o, Tensor) else type(o).__name__
            raise ValueError(f"{path} must return o [B, T, HQ, DV] = {wanted}, got {got}")
        if o.dtype != drawn.q.dtype:
            raise ValueError(f"{path} must return {drawn.q.dtype} as q is, got {o.dtype}")
        return o

    return Implementation(f"peer {path}", NSA, call, lambda drawn: list(wrong))


def wrong_paths(paths: Sequence[str]) -> list[str]:
    """Why those that nothing can be called by lead nowhere; importing is how one finds out."""
    return [reason for path in paths for reason in _found(path)[1]]


def _found(path: str):
    """(the callable or None, reasons for which it cannot be called)."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        return None, [f"--peer {path!r} is not of the form import.path:function"]
    try:
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except AttributeError:
        return None, [f"module {module} has no {name!r}"]
    except (Exception, SystemExit) as error:  # anything may happen in somebody's module
        return None, [f"{module} cannot be imported: {type(error).__name__}: {error}"]
    if not callable(function):
        return None, [f"{path} is no function but {type(function).__name__}"]
    try:
        inspect.signature(function).bind(*range(5))
    except TypeError as error:
        signature = inspect.signature(function)
        return None, [f"{path}{signature} does not take (q, k, v, gates, config): {error}"]
    except ValueError:  # a builtin tells no signature; the call will say
        pass
    return function, []
