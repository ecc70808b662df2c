"""A selection that a call hands out, and one that it is given: the whole operation and decoding."""

from dataclasses import replace

import pytest
import torch
from backend_calls import DEVICE, WITH_GRADIENT, attend, takes
from cached_cases import Growth, arguments, begun
from cases import TINY, Case, draw

from nsa.attention import registry, witness
from nsa.attention.api import nsa_attention
from nsa.attention.branches import scored
from nsa.attention.decode import nsa_decode
from nsa.attention.varlen import nsa_varlen_func
from nsa.reference.nsa import nsa

CASES = [Case(45, batch=2, group=1), Case(45, phi="linear", packed=(3, 1, 41), kv_heads=1)]
DECODING = ["reference", "masked", "gather", "prefix", "auto"]
NEW = 5


def exact_of(case):
    drawn = draw(case, torch.float64, DEVICE)
    args, options = drawn.arguments()
    return drawn, nsa(*args, **options)


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(backend, case, marks=[pytest.mark.slow] * (backend == "triton" and not packed))
        for backend in WITH_GRADIENT
        for packed, case in enumerate(CASES)
    ],
    ids=str,
)
def test_the_blocks_are_those_that_were_attended_to(backend, case):
    drawn, exact = exact_of(case)
    drawn = drawn.to(torch.float64 if takes(backend, torch.float64) else torch.float32)
    plain, fixed = attend(drawn, backend), attend(drawn, backend, blocks=exact.blocks)
    o, blocks = attend(drawn, backend, return_blocks=True)
    assert blocks.dtype == torch.int32 and torch.equal(blocks, exact.blocks)
    torch.testing.assert_close(o, plain, rtol=0, atol=1e-5)
    with torch.no_grad():
        o, *lse, again = attend(drawn, backend, return_blocks=True, return_lse=True)
    assert torch.equal(again, blocks) and [x.ndim for x in lse] == [4, 3]
    given, same = attend(drawn, backend, blocks=exact.blocks, return_blocks=True)
    assert same is exact.blocks and torch.equal(given, fixed)


def test_gradients_are_those_of_a_call_that_returns_o_alone():
    drawn, _ = exact_of(CASES[0])
    leaves, of = list(drawn.leaves.values()), torch.randn_like(drawn.leaves["q"])
    two = attend(drawn, "gather"), attend(drawn, "gather", return_blocks=True)[0]
    first, second = (torch.autograd.grad(o, leaves, of) for o in two)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-13)


def test_a_backend_says_by_whom_its_blocks_are_scored_and_keys_are_compressed(monkeypatch):
    drawn, _ = exact_of(CASES[1])
    found = []

    def score(inputs, note):
        note("score", "its own")
        blocks, (k_cmp, v_cmp) = scored(inputs, lambda *_: None)
        found.append((blocks.clamp(max=0), (k_cmp, 2 * v_cmp)))
        return found[0]

    own = replace(registry.get("gather"), name="own", score=score)
    monkeypatch.setitem(registry._loaded, "own", own)
    with witness.recording() as seen:
        o, blocks = attend(drawn, "own", return_blocks=True)
    ((given, compressed),) = found
    assert blocks is given and seen.paths["score", "its own"] == 1
    assert torch.equal(o, attend(drawn, "gather", blocks=given, compressed=compressed))


def test_strict_calls_and_packed_ones_without_a_batch_return_them_too():
    drawn, exact = exact_of(CASES[1])
    assert torch.equal(attend(drawn, "gather", strict=True, return_blocks=True)[1], exact.blocks)
    (q, k, v, gates, config), options = drawn.arguments()
    k, v = ({b: x[0] for b, x in side.items()} for side in (k, v))
    borders = options["cu_seqlens"]
    given = q[0], k, v, borders, borders, 41, 41, gates[0], config
    _, blocks = nsa_varlen_func(*given, phi=options["phi"], return_blocks=True)
    assert torch.equal(blocks, exact.blocks[0])


def test_queries_at_an_offset_return_their_own():
    drawn, exact = exact_of(CASES[0])
    (q, k, v, gates, config), _ = drawn.arguments()
    given = q[:, 30:], k, v, gates[:, 30:], config
    assert torch.equal(nsa_attention(*given, q_start=30, return_blocks=True)[1],
                       exact.blocks[:, 30:])  # fmt: skip


def test_branches_that_select_nothing_have_none_to_return():
    drawn, _ = exact_of(CASES[0])
    with pytest.raises(ValueError, match=r"return_blocks: branches=.'cmp', 'win'.* select none"):
        attend(drawn, "gather", branches=("cmp", "win"), return_blocks=True)


@pytest.mark.parametrize("branches", [("cmp", "slc", "win"), ("slc",)], ids=str)
@pytest.mark.parametrize("backend", DECODING)
def test_new_tokens_return_their_blocks_and_attend_to_those_given(backend, branches):
    """First the selection of the definition, then another, as the definition has them."""
    case = Case(45, batch=2)
    growth = Growth(case, (40, NEW), (45, 45), branches=branches)
    rows = slice(40, 45)
    drawn = draw(case, torch.float64)
    other = torch.stack([torch.randperm(5)[:4].sort().values for _ in range(2 * NEW * 2)])
    other = other.int().view(2, NEW, 2, 4)
    for given in (None, other):
        cache = growth.cache(torch.float64)
        q, k, v, gates, phi = arguments(drawn, growth, cache)
        whole = nsa(q, k, v, gates, TINY, phi=phi, branches=branches)
        for part in (slice(0, 40), rows):
            new = {
                side: {b: x[:, part] for b, x in of.items()} for side, of in (("k", k), ("v", v))
            }
            own = {"blocks": given if part is rows else None, "return_blocks": True}
            own |= {"gates": gates[:, part], "cache": cache, "phi": phi, "backend": backend}
            o, blocks = nsa_decode(q[:, part], **new, **own)
            if own["blocks"] is None:
                assert torch.equal(blocks, whole.blocks[:, part])
        if given is not None:
            assert blocks is given
            table = torch.cat([whole.blocks[:, :40], given], 1)
            whole = nsa(q, k, v, gates, TINY, phi=phi, branches=branches, blocks=table)
        torch.testing.assert_close(o, whole.o[:, rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("own", "branches", "message"),
    [
        ({"blocks": torch.zeros(2, 1, 2, 3).int()}, ("slc",), r"blocks must be .* \(2, 1, 2, 4\)"),
        ({"blocks": torch.zeros(2, 1, 2, 4)}, ("slc",), "in int32, got .* of torch.float32"),
        ({"blocks": [0]}, ("slc",), "blocks is a list"),
        ({"return_blocks": True}, ("win",), "a cache of .'win',. selects none"),
    ],
)
def test_decoding_refuses_blocks_that_do_not_fit(own, branches, message):
    case = Case(1, batch=2)
    growth = Growth(case, (1,), (1, 1), branches=branches)
    cache, (q, k, v, gates, phi) = begun(growth)
    with pytest.raises(ValueError, match=message):
        nsa_decode(q, k, v, gates, cache, phi=phi, **own)
    assert cache.lengths.tolist() == [0, 0]
