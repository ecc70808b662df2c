"""Attention sinks and log-sum-exps: the definition with a column more, and the backends."""

import math
import random
from dataclasses import replace

import pytest
import torch
from accuracy import assert_as_accurate, assert_same
from backend_calls import DEVICE, NAMES, WITH_GRADIENT, attend, check, interpreted, later, takes
from cases import CASES, EVEN, ODD, SMALL, TINY, Case, draw

from nsa.attention.api import explain, nsa_attention
from nsa.attention.inputs import checked
from nsa.attention.registry import Declined, get
from nsa.reference.compress import compress_keys, compress_values
from nsa.reference.nsa import BRANCHES, nsa

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

# Every case that all backends are tested on, shorter, with sinks of both kinds.
SUNK = [replace(x, sinks=("branches", "heads")[i % 2]) for i, x in enumerate(CASES)]


def written_out(drawn, blocks):
    """(o, lse [B, T, HQ, 3]) in plain torch of one sequence: the sink is a column of the scores."""
    (q, k, v, gates, config), options = drawn.arguments()
    tokens, group = q.shape[1], q.shape[2] // k["win"].shape[2]
    t, s = torch.arange(tokens)[:, None], torch.arange(tokens)
    ends = torch.arange(max(0, (tokens - config.compress_block) // config.compress_stride + 1))
    ended = (ends * config.compress_stride + config.compress_block - 1 <= t)[None, None]
    chosen = (s // config.select_block == blocks[..., None]).any(3).transpose(1, 2)
    seen = {
        "cmp": (compress_keys(k["cmp"], options["phi"], config), ended),
        "slc": (k["slc"], (chosen & (s <= t)).repeat_interleave(group, 1)),
        "win": (k["win"], ((s <= t) & (s > t - config.window))[None, None]),
    }
    values = v | {"cmp": compress_values(v["cmp"], options["phi"], config)}
    sinks, o, found = drawn.leaves["sinks"], 0.0, []
    sinks = sinks if sinks.ndim == 2 else sinks[:, None].expand(-1, 3)
    for index, branch in enumerate(BRANCHES):
        keys, mask = seen[branch]
        keys, of = (x.repeat_interleave(group, 2) for x in (keys, values[branch]))
        scores = torch.einsum("bthd,bshd->bhts", q, keys) * q.shape[3] ** -0.5
        scores = scores.masked_fill(~mask, -math.inf)
        column = sinks[:, index, None, None].expand(*scores.shape[:3], 1)
        probs = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        o = o + gates[..., index, None] * torch.einsum("bhts,bshd->bthd", probs, of)
        found.append(scores.logsumexp(-1).transpose(1, 2))
    return o, torch.stack(found, -1)


def random_case(seed: int) -> Case:
    r = random.Random(seed)
    tokens, kv_heads, group = r.choice((1, 5, 23, 41)), r.choice((1, 2)), r.choice((1, 2, 3, 4))
    dim, value_dim = r.choice(((16, 16), (24, 40), (64, 64), (16, 128)))
    packed = r.choice(((), (), (tokens - tokens // 3, tokens // 3)))
    shape = tokens, kv_heads, group, dim, value_dim, 1 if packed else r.choice((1, 2))
    options = {"phi": r.choice(("mean", "linear", "mlp")), "shared": r.random() < 0.3}
    config = r.choice((TINY, SMALL, EVEN, ODD))
    sinks = r.choice(("heads", "branches"))
    return Case(*shape, config=config, packed=packed, sinks=sinks, **options)


@pytest.mark.parametrize("seed", range(12))
def test_the_definition_is_a_softmax_with_one_column_more(seed):
    drawn = draw(replace(random_case(seed), packed=()))
    args, options = drawn.arguments()
    result = nsa(*args, **options)
    o, lse = written_out(drawn, result.blocks)
    do, leaves = torch.randn_like(o), list(drawn.leaves.values())
    wanted, got = (
        torch.autograd.grad(x, leaves, do, allow_unused=True, materialize_grads=True)
        for x in (o, result.o)
    )
    torch.testing.assert_close(result.o, o, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.stack([result.lse[b] for b in BRANCHES], -1), lse)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


def chosen_here(backends, cases, dtypes):
    for backend in backends:
        for number, case in enumerate(cases):
            dtype = [x for x in dtypes if takes(backend, x)][number % len(dtypes) - len(dtypes)]
            slow = interpreted(backend)
            marks = [pytest.mark.full] * (slow or case.tokens > 60)
            marks += [pytest.mark.long] * (slow and case.tokens > 63)
            name = str(dtype).removeprefix("torch.")
            yield pytest.param(backend, case, dtype, id=f"{backend}-{case}-{name}", marks=marks)


LOW = torch.float32, torch.float16


@pytest.mark.parametrize(
    ("backend", "case", "dtype"),
    [
        *chosen_here(NAMES, SUNK, LOW),
        *chosen_here(NAMES, [random_case(seed) for seed in range(100, 107)], LOW[:1]),
        *chosen_here(["sdpa:math"], SUNK[4:5], LOW),
        *chosen_here(["gather", "packed", "sdpa", "masked"], SUNK[3:8], [torch.bfloat16]),
    ],
)
def test_outputs_and_gradients_are_as_accurate_as_the_definition_in_the_dtype(backend, case, dtype):
    check(backend, case, dtype)


@torch.no_grad()
@pytest.mark.parametrize("number", [0, 4, 5, 12])
@pytest.mark.parametrize("backend", later(NAMES))
def test_the_lse_of_each_branch_is_that_of_its_keys_whatever_the_sinks(backend, number):
    exact_inputs = draw(SUNK[number], device=DEVICE)
    args, options = exact_inputs.arguments()
    exact = nsa(*args, **options)
    drawn = exact_inputs.to(torch.float32)
    drawn.blocks = exact.blocks
    args, options = drawn.arguments()
    plain = nsa(*args, **options).lse
    o, lse, combined = attend(drawn, backend, return_lse=True)
    assert_same(o, attend(drawn, backend))
    assert lse.dtype == combined.dtype == torch.float32
    assert lse.shape == (*o.shape[:3], 3) and combined.shape == o.shape[:3]
    for index, branch in enumerate(BRANCHES):
        got, truth, none = lse[..., index], exact.lse[branch], exact.lse[branch].isneginf()
        assert torch.equal(got.isneginf(), none), branch
        results = (x.masked_fill(none, 0.0) for x in (got, plain[branch], truth))
        assert_as_accurate(f"lse of {branch}", *results, magnitude=4.0)
    summed = torch.stack([exact.lse[b] for b in BRANCHES], -1).exp().sum(-1).log()
    torch.testing.assert_close(combined.double(), summed, rtol=1e-5, atol=1e-5)
    without = drawn.arguments()[1] | {"sinks": None}
    _, same, _ = nsa_attention(*args, **without, return_lse=True, backend=backend)
    assert_same(same, lse)


@pytest.mark.parametrize("backend", later(WITH_GRADIENT))
def test_asking_for_lse_changes_no_bit_and_gives_it_no_gradient(backend):
    case = replace(CASES[4], tokens=17)
    drawn = draw(case, torch.float32, DEVICE)
    plain = attend(drawn, backend)
    o, lse, combined = attend(drawn, backend, return_lse=True)
    leaves, do = list(drawn.leaves.values()), torch.randn_like(o)
    assert_same(o, plain)
    assert not lse.requires_grad and not combined.requires_grad
    grads = (torch.autograd.grad(x, leaves, do, allow_unused=True) for x in (o, plain))
    for got, want in zip(*grads, strict=True):
        if got is not want:
            assert_same(got, want)


@pytest.mark.parametrize("backend", later(NAMES))
def test_a_branch_that_is_not_computed_has_seen_nothing(backend):
    with torch.no_grad():
        drawn = draw(Case(9, sinks="branches"), torch.float32, DEVICE)
        _, lse, combined = attend(drawn, backend, branches=("win",), return_lse=True)
    assert lse[..., :2].isneginf().all() and torch.equal(lse[..., 2], combined)


@pytest.mark.parametrize("backend", later(WITH_GRADIENT))
def test_sinks_of_minus_infinity_are_none_and_of_infinity_are_all(backend):
    """Also in rows that see no key, and without a NaN in any gradient."""
    drawn = draw(Case(9, group=2, sinks="branches"), torch.float32, DEVICE)
    sinks = drawn.leaves["sinks"]
    plain = attend(drawn, backend, sinks=None)
    for value, wanted in ((-math.inf, plain), (math.inf, torch.zeros_like(plain))):
        with torch.no_grad():
            sinks.fill_(value)
        o = attend(drawn, backend)
        torch.testing.assert_close(o, wanted, rtol=1e-5, atol=1e-6)
        grads = torch.autograd.grad(o.sum(), list(drawn.leaves.values()), allow_unused=True)
        assert all(x is None or bool(x.isfinite().all()) for x in grads)


@pytest.mark.parametrize("backend", later(WITH_GRADIENT))
def test_strict_mode_computes_the_same(backend):
    drawn = draw(Case(17, packed=(5, 12), sinks="branches"), torch.float32, DEVICE)
    o, lse, combined = attend(drawn, backend, return_lse=True)
    found = attend(drawn, backend, return_lse=True, strict=True)
    torch.testing.assert_close(found, (o, lse, combined), rtol=1e-5, atol=1e-5)
    leaves = list(drawn.leaves.values())
    got, want = (torch.autograd.grad(x.sum(), leaves) for x in (found[0], o))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_one_graph_compiles_with_both():
    compiled = torch.compile(nsa_attention, fullgraph=True, backend="aot_eager")
    drawn = draw(Case(17, kv_heads=1, sinks="branches"), torch.float32, DEVICE)
    args, options = drawn.arguments()
    options |= {"backend": "triton", "return_lse": True}
    got, want = compiled(*args, **options), nsa_attention(*args, **options)
    torch.testing.assert_close(got, want)
    leaves = list(drawn.leaves.values())
    got, want = (torch.autograd.grad(x[0].sum(), leaves) for x in (got, want))
    torch.testing.assert_close(got, want)


def test_learning_sinks_alone_is_possible():
    drawn = draw(Case(17, sinks="branches"), torch.float32, DEVICE)
    together = torch.autograd.grad(attend(drawn, "gather").sum(), drawn.leaves["sinks"])
    for name, leaf in drawn.leaves.items():
        leaf.requires_grad_(name == "sinks")
    alone = torch.autograd.grad(attend(drawn, "gather").sum(), drawn.leaves["sinks"])
    torch.testing.assert_close(alone, together)


def test_flash_declines_both_by_name():
    args, options = draw(Case(9, sinks="heads"), torch.float32).arguments()
    for asked in ({"sinks": options["sinks"]}, {"return_lse": True}):
        assert any("log-sum-exp" in why for why in get("flash").why_not(checked(*args, **asked)))
        with pytest.raises(Declined, match=r"'flash' does not take .* no log-sum-exp"):
            nsa_attention(*args, **asked, backend="flash")
    assert "flash declined" in explain(*args, sinks=options["sinks"], return_lse=True)


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (torch.zeros(3), r"sinks must be \[HQ\] = \(4,\) or \[HQ, 3\] = \(4, 3\).*got \(3,\)"),
        (torch.zeros(4, 2), r"got \(4, 2\)"),
        (torch.zeros(4, 3).long(), "in floating point, got .* of torch.int64"),
        (torch.zeros(4, 3, device="meta"), "sinks is on meta and q on cpu"),
        (0.0, r"sinks is a float and must be a tensor \[HQ\] = \(4,\) or \[HQ, 3\]"),
    ],
)
def test_sinks_that_do_not_fit_are_refused(sinks, message):
    args, _ = draw(Case(9), torch.float32).arguments()
    with pytest.raises(ValueError, match=message):
        nsa_attention(*args, sinks=sinks, backend="masked")
