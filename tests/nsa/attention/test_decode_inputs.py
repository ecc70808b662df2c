"""Refusals of `nsa_decode` before anything is written, with what it got and what would do."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from cached_cases import Growth, begun, contents, unchanged
from cases import TINY, Case, of

from nsa.attention.decode import nsa_decode
from nsa.attention.registry import Declined

GROWTH = Growth(Case(20, batch=2, dim=16, value_dim=4, phi="linear"), (20,), (20, 20))


@pytest.fixture
def call():
    """Calls nsa_decode with 3 tokens behind 8 held ones, some arguments replaced."""
    cache, (q, k, v, gates, phi) = begun(GROWTH, torch.float32)
    rows = slice(0, 8), slice(8, 11)
    k8, k3 = ({b: x[:, r] for b, x in k.items()} for r in rows)
    v8, v3 = ({b: x[:, r] for b, x in v.items()} for r in rows)
    nsa_decode(q[:, :8], k8, v8, gates[:, :8], cache, phi=phi)
    good = {"q": q[:, 8:11], "k": k3, "v": v3, "gates": gates[:, 8:11], "cache": cache, "phi": phi}

    def run(**changes):
        return nsa_decode(**(good | changes))

    run.good = good
    return run


def counts(*values, dtype=torch.int32):
    return {"counts": torch.tensor(values, dtype=dtype)}


REFUSED = [
    ({"config": replace(TINY, window=7)}, "cache was made for .*window=6.* caller has .*window=7"),
    ({"cache": "none"}, "cache must be a LayerCache, got a str"),
    ({"q": of(2, 3, 4, 16, dtype=torch.float64)}, "q is torch.float64 and the cache torch.float32"),
    ({"q": of(2, 3, 4, 16, device="meta")}, "q is on meta and the cache on cpu"),
    ({"q": of(3, 3, 4, 16)}, "the cache holds B=2 sequences with D=16 and q has shape"),
    ({"q": of(2, 3, 4, 8)}, "the cache holds B=2 sequences with D=16 and q has shape"),
    ({"q": of(2, 3, 5, 16)}, "HQ a multiple of the cache's HKV=2, got"),
    ({"q": of(2, 0, 4, 16)}, r"q must be \[B, N, HQ, D\]"),
    ({"q": None}, "q is a NoneType and must be a tensor"),
    ({"k": of(2, 3, 2, 8)}, r"k_slc must be .* = \(2, 3, 2, 16\) .*, got \(2, 3, 2, 8\)"),
    ({"k": of(2, 4, 2, 16)}, r"\(2, 3, 2, 16\) with N of at least 1, got \(2, 4, 2, 16\)"),
    ({"k": {"cmp": of(2, 3, 2, 16)}}, r"k has no entry for slc, win; it has \['cmp'\]"),
    ({"v": of(2, 3, 2, 4, dtype=torch.bfloat16)}, "v_slc is torch.bfloat16 on cpu and the cache"),
    ({"v": of(2, 3, 2, 4, device="meta")}, "v_slc is torch.float32 on meta and the cache"),
    ({"v": {"cmp": 1, "slc": 1, "win": 1}}, "v_slc is a int and must be a tensor"),
    ({"gates": of(2, 3, 4, 2)}, r"gates must be .* = \(2, 3, 4, 3\)"),
    ({"gates": of(2, 3, 4, 3, dtype=torch.int32)}, "in floating point, got .* of torch.int32"),
    ({"gates": of(2, 3, 4, 3, device="meta")}, "gates is on meta and q on cpu"),
    (counts(1, 2, 3), r"counts must be int32 \[B\] = \(2,\), got \(3,\)"),
    (counts(1, 2, dtype=torch.int8), "got .* of torch.int8"),
    (counts(1, 4) | {"strict": True}, r"counts=\[1, 4\] must be within 0..3"),
    (counts(-1, 3) | {"strict": True}, r"counts=\[-1, 3\] must be within 0..3"),
    ({"phi": None, "scale": float("nan")}, "scale=nan must be finite"),
    ({"backend": "gathers"}, "backend='gathers' is unknown; the nearest is 'gather'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_fit_is_refused_and_nothing_is_overwritten(call, changes, message):
    cache = call.good["cache"]
    with unchanged(cache), pytest.raises(ValueError, match=message):
        call(**changes)
    assert cache.longest == 8
    call()  # it is as good as before
    assert cache.lengths.tolist() == [11, 11]


def test_weights_of_phi_that_do_not_fit_are_refused(call):
    phi = call.good["phi"]
    short = replace(phi, key=replace(phi.key, position=phi.key.position[:, 1:]))
    with pytest.raises(ValueError, match=r"phi.key.position must be \(2, 4, 16\) for linear"):
        call(phi=short)
    tables = of(15, 8), of(15, 8)  # the last block of the capacity, 24 tokens, begins at 20
    with pytest.raises(ValueError, match=r"phi.rotary needs tables of at least 21 positions x 8"):
        call(phi=replace(phi, rotary=tables))


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("forward", "needs an empty cache"),
        ("triton", r"takes up to slack=16 new tokens, got 17|needs D and DV|not installed"),
    ],
)
def test_a_backend_that_is_named_says_why_it_does_not_run(call, backend, reason):
    new = {"q": (4, 16), "k": (2, 16), "v": (2, 4), "gates": (4, 3)}
    longer = {name: of(2, 17, *shape) for name, shape in new.items()}
    cache = GROWTH.cache(torch.float32, capacity=40)
    cache.append(call.good["k"], call.good["v"], call.good["phi"])
    with pytest.raises(Declined, match=f"backend '{backend}' does not take this call: .*{reason}"):
        call(backend=backend, **longer, cache=cache)
    assert cache.lengths.tolist() == [3, 3]


@pytest.mark.parametrize("new", [16, 17])
def test_the_kernels_take_as_many_new_tokens_as_the_slack(call, new):
    sizes = {"q": (4, 16), "k": (2, 16), "v": (2, 4), "gates": (4, 3)}
    longer = {name: of(2, new, *shape, dtype=torch.float64) for name, shape in sizes.items()}
    cache = GROWTH.cache(torch.float64, capacity=40)
    with pytest.raises(Declined) as declined:  # for fp64 at the least
        call(backend="triton", **longer, cache=cache, phi=None)
    assert ("slack=16" in str(declined.value)) == (new > 16)


@pytest.mark.parametrize("backend", ["reference", "masked", "gather"])
def test_counts_out_of_range_store_and_attend_as_the_nearest_in_range(call, backend):
    outputs, states = [], []
    for given in ((-5, 9), (0, 3)):
        cache = deepcopy(call.good["cache"])
        outputs.append(call(cache=cache, backend=backend, **counts(*given)))
        states.append(contents(cache))
        assert cache.lengths.tolist() == [8, 11]
    assert torch.equal(*outputs)
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


def test_a_shared_cache_takes_one_tensor_for_selected_and_window(call):
    cache = replace(GROWTH, shared=True).cache(torch.float32)
    k = call.good["k"]
    with pytest.raises(ValueError, match=r"k\['win'\] and k\['slc'\] must be one tensor"):
        call(cache=cache)
    v = call.good["v"]
    same = [{**x, "win": x["slc"]} for x in (k, v)]
    assert call(cache=cache, k=same[0], v=same[1]).shape == (2, 3, 4, 4)


def test_strict_mode_stops_at_an_output_that_is_not_finite(call):
    v = {b: x.clone() for b, x in call.good["v"].items()}
    v["win"][1, 2, 0, 3] = torch.inf
    with pytest.raises(FloatingPointError, match="the output of decode-gather at no place named"):
        call(v=v, strict=True)
