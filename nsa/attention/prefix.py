"""Many new tokens behind what a cache holds, by `nsa_attention`'s backends: prefill in chunks."""

from collections.abc import Iterator

from torch import Tensor

from nsa.attention.api import branches_of, with_blocks
from nsa.attention.cached import Call, Recent
from nsa.attention.inputs import Inputs, checked
from nsa.attention.registry import Note, choose
from nsa.blocks import count_compressed


def prefix(call: Call, recent: Recent, note: Note) -> dict[str, Tensor]:
    """o [B, N, HQ, DV] of each branch, by the backend that "auto" takes for queries with `q_start`.

    Selected and compressed keys are read from the cache, without a copy where it is contiguous, and
    the window's from `recent`. Sequences of other lengths take a call each. Waits for the
    device once, for the lengths.
    """
    outputs: dict[str, Tensor] = {}
    for rows, inputs in _calls(call, recent):
        backend = choose(inputs).backend
        if call.selection is not None and "slc" in inputs.branches:
            inputs = with_blocks(inputs, backend, note)
            call.selection[rows, : inputs.q.shape[1]] = inputs.blocks
        found, _ = branches_of(backend, inputs, note)
        for branch, o in found.items():
            whole = outputs.get(branch)
            if whole is None:
                whole = outputs[branch] = o.new_zeros(*call.q.shape[:3], o.shape[3])
            whole[rows, : o.shape[1]] = o
    return outputs


def _calls(call: Call, recent: Recent) -> Iterator[tuple[slice, Inputs]]:
    """(sequences, inputs) of each call; queries behind the capacity are in none."""
    cache, config, new = call.cache, call.config, call.q.shape[1]
    held, ends, reach = cache.lengths.tolist(), call.ends, call.config.window - 1
    same = len(set(held)) == 1
    groups = [slice(None)] if same else [slice(b, b + 1) for b in range(len(held))]
    read = tuple(b for b in cache.shape.branches if b != "win")
    most = min(max(held) + new, cache.shape.capacity)
    if read:
        k, v = cache.tokens(most, ends)
        k_cmp, v_cmp = cache.compressed(count_compressed(most, config), ends)
    for rows, length in zip(groups, held, strict=False):
        queries = call.q[rows]
        gates = queries.new_zeros(*queries.shape[:3], 3)  # each branch is wanted by itself
        options = {"scale": call.scale, "sinks": call.sinks}
        if read:
            total = min(length + new, cache.shape.capacity)
            count, real = count_compressed(total, config), slice(0, total - length)
            compressed = k_cmp[rows, :count], None if v_cmp is None else v_cmp[rows, :count]
            keys, values = ({"cmp": x[rows, :total], "slc": x[rows, :total]} for x in (k, v))
            given = queries[:, real], keys, values, gates[:, real], config
            own = {"q_start": length, "compressed": compressed, "branches": read}
            own["blocks"] = None if call.blocks is None else call.blocks[rows, real]
            if real.stop:
                yield rows, checked(*given, **options, **own)
        if "win" in cache.shape.branches:
            before = min(length, reach)
            newest = ({"win": x[rows, reach - before :]} for x in recent)
            own = {"q_start": before, "branches": ("win",)}
            yield rows, checked(queries, *newest, gates, config, **options, **own)
